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
// In a far row, |r| >= kFar, that factor could leave the range of numbers: there s c is rounded as r is. Kernels where
// speed matters take no notice of it until the end, and then work such a block out anew.
// A row without weight has row_max = -inf and row_sum = 0, and then every P is 0. Until a row has met a key its
// statistic is `kNothingYet`, a finite number, so that no difference of infinities turns up.
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
  // A row's factor is nearer to 1 than 0.2 %, which is less than a logit of that size is uncertain by.
  static constexpr Acc kFar = static_cast<Acc>(sizeof(Acc) == 8 ? 0x1p45 : 0x1p16);

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

  // The three functions take `scaled` as an argument, so that kernels that know it can say so.

  // What becomes of a row's largest number (score or logit).
  static __device__ __forceinline__ Acc statistic(Acc max, Acc c, bool scaled) { return scaled ? max : max * c; }

  // 2^((x - m) c - r), where one of m and r is 0 and drops out exactly.
  static __device__ __forceinline__ Acc weight(Acc x, Acc row_max, Acc c, bool scaled) {
    return exp2_of(fused_multiply_add(x - (scaled ? row_max : Acc{0}), c, scaled ? Acc{0} : -row_max));
  }

  // Also of a row that has no maximum, where it makes no difference to weights.
  static __device__ __forceinline__ bool may_be_far(Acc row_max, bool scaled) {
    return !scaled && abs(row_max) >= kFar;
  }
  static __device__ __forceinline__ bool is_far(Acc row_max, bool scaled) {
    return may_be_far(row_max, scaled) && abs(row_max) < static_cast<Acc>(FiniteRange<Acc>::largest);
  }

  // The weight where the row may be far: then s c, rounded as r is, takes the place of s, and 1 that of c.
  static __device__ __forceinline__ Acc weight(Acc x, Acc row_max, Acc c, bool scaled, bool far) {
    return weight(far ? multiply(x, c) : x, row_max, far ? Acc{1} : c, scaled);
  }

  // What a sum relative to the statistic `before` is to be multiplied with to be relative to `after`.
  static __device__ __forceinline__ Acc rescale(Acc before, Acc after, Acc c, bool scaled) {
    return exp2_of(scaled ? (before - after) * c : before - after);
  }
};

// What turns sums of weights times values into the output; 0 in a row that sees nothing.
template <class Acc>
MHA_DEVICE Acc inverse_sum(Acc sum, Acc keep_scale) {
  return sum == 0 ? Acc{0} : keep_scale / sum;
}

}  // namespace mha::cuda
