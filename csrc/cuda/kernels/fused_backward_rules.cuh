// What the kernels of the fused backward do with one pair of a query and a key:
//   x  = logit of the score s            as in the forward and with the same bits
//   P  = e^(x - m) / l                   m, l: row_max and row_sum of the forward; nothing is normalized anew
//   dP = dO . V + dW                     both through dropout
//   dx = P (dP - delta)                  delta: fused_delta.cuh
//   dS = dx dx/ds                        the slope of softcap; 0 for hidden keys
// Where P is 0 everything is, whatever the other factors hold.
#pragma once
#include "../../core/attention.h"
#include "../../core/half.h"
#include "fused_backward_call.cuh"

namespace mha::cuda {

template <class Acc>
struct GradTerms {
  Acc kept;  // P after dropout, not yet divided by 1 - p
  Acc logit_grad, score_grad;
};

// What a pair is subject to, of one entry (query head), where no option asks for more than visibility.
struct VisibilityRules {
  const BatchVisibility visibility;

  __device__ __forceinline__ VisibilityRules(const GradCall<float>& call, int64_t entry)
      : visibility(visibility_of(call.p.visibility, call.p.batch, entry, call.p.keys)) {}
};

// The same with all options.
template <class T>
struct GradRules {
  using Acc = accumulate_t<T>;
  static constexpr Acc kInfinity = static_cast<Acc>(__builtin_inf());

  const FusedBackward& p;
  const uint32_t entry;  // 32 bits: registers are short, and each entry has a block of some grid
  const Logits<Acc>& logits;
  const Acc keep_scale;
  const BatchVisibility visibility;
  const T *bias, *grad_weights;  // null: none

  __device__ GradRules(const GradCall<Acc>& call, int64_t of)
      : p(call.p),
        entry(static_cast<uint32_t>(of)),
        logits(call.logits),
        keep_scale(call.keep_scale),
        visibility(visibility_of(p.visibility, p.batch, entry, p.keys)),
        bias(p.bias ? matrix<const T>(p.batch, entry, p.bias) : nullptr),
        grad_weights(p.grad_weights ? matrix<const T>(p.batch, entry, p.grad_weights) : nullptr) {}

  __device__ GradRow<Acc> row(int64_t query) const {
    if (query >= p.queries) return GradRow<Acc>::none();
    return GradRow<Acc>::of(matrix<const Acc>(p.batch, entry, p.row_max)[query * p.row_max.row_stride],
                            matrix<const Acc>(p.batch, entry, p.row_sum)[query * p.row_sum.row_stride],
                            matrix<const Acc>(p.batch, entry, p.delta)[query * p.delta.row_stride]);
  }

  // Mask and ranges.
  __device__ bool sees(int64_t query, int64_t key) const {
    const KeyRange range = visible_keys(visibility, query);
    if (key < range.begin || key >= range.end) return false;
    const uint8_t* mask = visibility.mask;
    return !mask || mask[query * visibility.mask_row_stride + key * visibility.mask_col_stride] != 0;
  }

  // What the exponential sees: a score or a logit, as `scaled` says.
  __device__ Acc exponent(int64_t query, int64_t key, Acc score, bool seen) const {
    if (!seen) return logits.hidden;
    if (!logits.scaled) return score;
    return logits.logit(score,
                        bias ? to_accumulate(bias[query * p.bias.row_stride + key * p.bias.col_stride]) : Acc{0});
  }

  __device__ Acc weight(const GradRow<Acc>& row, Acc x) const {
    if (x == -kInfinity) return 0;
    return row.weight(x, logits.c, logits.scaled, true);
  }

  // dx/ds = 1 - tanh(y)^2 = 4 e / (1 + e)^2 with e = e^(-2 |y|): right where 1 - tanh^2 would cancel.
  __device__ Acc steepness(Acc score) const {
    if (logits.softcap == 0) return 1;
    constexpr double kTwoLog2E = 2.8853900817779268;
    const Acc e = exp2_of(-static_cast<Acc>(kTwoLog2E) * abs(logits.slope * score));
    return 4 * e / ((1 + e) * (1 + e));
  }

  // `grad`: dO . V. Only for pairs of a query and a key that there are.
  __device__ GradTerms<Acc> terms(const GradRow<Acc>& row, int64_t query, int64_t key, Acc score, Acc grad, bool seen,
                                  bool keep) const {
    const Acc weight = this->weight(row, exponent(query, key, score, seen));
    if (weight == 0) return {0, 0, 0};
    if (grad_weights)
      grad += to_accumulate(grad_weights[query * p.grad_weights.row_stride + key * p.grad_weights.col_stride]);
    grad = (keep ? grad * keep_scale : Acc{0}) - row.delta;
    // A hidden key's logit is a constant.
    const Acc logit_grad = seen ? weight * grad : Acc{0}, slope = steepness(score);
    return {keep ? weight : Acc{0}, logit_grad, slope == 0 ? Acc{0} : logit_grad * slope};
  }
};

}  // namespace mha::cuda
