// From scores to weights: what forward and backward must do alike, operation for operation, so that the backward's
// P = weight(x, row_max) / row_sum meets the very numbers that the forward has summed.
//
// The score s of a query and a key is their product, summed from 0 on in float: on tensor cores by mma(c += a b) in
// steps of 16 elements of the head in ascending order (elements behind the head are zeros), elsewhere by one fused
// multiply-add per element in ascending order.
//
// What a tile holds after that, and what row_max is, depends on `scaled`:
//   false   the scores as they are.      row_max = r = (max s) c,   weight = 2^(s c - r),     c = scale log2 e
//   true    logits, with all options.    row_max = m = max x,       weight = 2^((x - m) c),   c = log2 e
// Either is e^(logit - largest logit), but for a factor of the whole row that row_sum shares: r is rounded once, and
// s c - r is one fused multiply-add. That saves a multiplication where speed matters; the other way holds up to the
// largest numbers (a mask_value of -3.4e38).
// A far row, |r| >= kFar, is treated as if `scaled` held, its row_max being max s: there the factor could leave the
// range of numbers. Its row_sum gets a minus sign, by which the backward knows it. Kernels where speed matters take no
// notice of far rows until the end, and then do the block again (`careful`). A row without weight has row_max = -inf
// and row_sum = 0, and then every P is 0. Until a row has met a key its statistic is `kNothingYet`, a finite number, so
// that no difference of infinities turns up.
#pragma once
#include "../../core/attention.h"
#include "../../core/finite.h"
#include "elements.cuh"

namespace mha::cuda {

MHA_DEVICE float exp2_of(float x) { return exp2_approximate(x); }
MHA_DEVICE double exp2_of(double x) { return exp2(x); }
MHA_DEVICE float fused_multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
MHA_DEVICE double fused_multiply_add(double a, double b, double c) { return __fma_rn(a, b, c); }
MHA_DEVICE float multiply(float a, float b) { return __fmul_rn(a, b); }  // never part of a fused multiply-add
MHA_DEVICE double multiply(double a, double b) { return __dmul_rn(a, b); }

template <class Acc>
struct Logits {
  static constexpr Acc kNothingYet = -static_cast<Acc>(FiniteRange<Acc>::largest);
  static constexpr Acc kMinusInfinity = -static_cast<Acc>(__builtin_inf());
  // The end of the fractions: below, r is off by 1/2 at most.
  static constexpr Acc kFar = static_cast<Acc>(sizeof(Acc) == 8 ? 0x1p53 : 0x1p24);

  Acc scale, softcap, slope;  // softcap 0: none; slope = scale / softcap
  Acc hidden;                 // the logit of hidden keys
  Acc c;
  bool scaled;              // see above
  bool hidden_have_weight;  // mask_value is finite: no tile may be skipped

  // A scale that is zero, negative or at the ends of the range of numbers takes the plain way too.
  static bool needs_scaling(const Attention& p) {
    const bool ordinary = p.scale > 1e-30 && p.scale < 1e30;
    return p.softcap != 0 || p.bias || p.sinks || p.mask_value != -__builtin_inf() || !ordinary;
  }

  static Logits of(const Attention& p) {
    constexpr double kLog2E = 1.4426950408889634;
    Logits l;
    l.scale = to_finite<Acc>(p.scale);
    l.softcap = softcap_in<Acc>(p.softcap);
    l.slope = p.softcap != 0 ? to_finite<Acc>(p.scale / static_cast<double>(l.softcap)) : Acc{0};
    l.hidden = to_finite<Acc>(p.mask_value);
    l.scaled = needs_scaling(p);
    l.c = static_cast<Acc>(l.scaled ? kLog2E : p.scale * kLog2E);
    l.hidden_have_weight = l.hidden != kMinusInfinity;
    return l;
  }

  // tanh(scale s / softcap); only with softcap.
  __device__ __forceinline__ Acc capped(Acc s) const { return tanh_of(slope * s); }

  // The logit of a visible key, where `scaled`; bias: 0 if there is none.
  __device__ __forceinline__ Acc logit(Acc s, Acc bias) const {
    return softcap != 0 ? fused_multiply_add(softcap, capped(s), bias) : fused_multiply_add(s, scale, bias);
  }

  // What becomes of a row's largest number (score or logit). `scaled` is an argument, here and below, so that kernels
  // that know it can say so.
  static __device__ __forceinline__ Acc statistic(Acc max, Acc c, bool scaled) {
    return scaled ? max : multiply(max, c);
  }
};

// What the scores or logits of a row are compared with: the weight is 2^((x - score) c - exponent), where one of score
// and exponent is 0 and drops out exactly.
template <class Acc>
struct RowShift {
  Acc score, exponent;

  static __device__ __forceinline__ RowShift of(Acc row_max, bool scaled) {
    return {scaled ? row_max : Acc{0}, scaled ? Acc{0} : row_max};
  }
  // From the row's largest number: the row may be far.
  static __device__ __forceinline__ RowShift of_largest(Acc max, Acc c, bool scaled) {
    return scaled || is_far(max, c) ? of(max, true) : of(multiply(max, c), false);
  }
  static __device__ __forceinline__ bool is_far(Acc max, Acc c) { return abs(multiply(max, c)) >= Logits<Acc>::kFar; }

  __device__ __forceinline__ Acc weight(Acc x, Acc c) const {
    return exp2_of(fused_multiply_add(x - score, c, -exponent));
  }
  // What a sum relative to this is to be multiplied with to be relative to `after`.
  __device__ __forceinline__ Acc rescale(const RowShift& after, Acc c) const {
    return exp2_of(fused_multiply_add(score - after.score, c, exponent - after.exponent));
  }
};

// What other kernels get to know of a row.
template <class Acc>
struct RowStatistics {
  Acc max, sum;

  static __device__ __forceinline__ RowStatistics of(Acc max, Acc sum, bool far) {
    if (sum == 0) return {Logits<Acc>::kMinusInfinity, 0};
    return {max, far ? -sum : sum};
  }
  // From the row's largest number: the row may be far.
  static __device__ __forceinline__ RowStatistics of_largest(Acc max, Acc sum, Acc c, bool scaled) {
    const bool far = !scaled && RowShift<Acc>::is_far(max, c);
    return of(Logits<Acc>::statistic(max, c, scaled || far), sum, far);
  }

  __device__ __forceinline__ bool is_far() const { return sum < 0; }
  __device__ __forceinline__ RowShift<Acc> shift(bool scaled) const {
    return RowShift<Acc>::of(max, scaled || is_far());
  }
  // Of rows that are not both far, the one that is has the larger maximum if that is positive.
  __device__ __forceinline__ bool exceeds(const RowStatistics& other) const {
    if (is_far() == other.is_far()) return max > other.max;
    return is_far() ? max > 0 : other.max < 0;
  }
};

// What turns sums of weights times values into the output; 0 in a row that sees nothing.
template <class Acc>
MHA_DEVICE Acc inverse_sum(Acc sum, Acc keep_scale) {
  return sum == 0 ? Acc{0} : keep_scale / sum;
}

}  // namespace mha::cuda
