// What the kernels of the fused backward do with one pair of a query and a key:
//   x  = logit of the score s            as in the forward and with the same bits
//   P  = e^(x - m) / l                   m, l: row_max and row_sum of the forward; nothing is normalized anew
//   dP = dO . V + dW                     both through dropout
//   dx = P (dP - delta)                  delta: fused_delta.cuh
//   dS = dx dx/ds                        the slope of softcap; 0 for hidden keys
// Where P is 0 everything is, whatever the other factors hold.
#pragma once
#include <cmath>

#include "../../core/attention.h"
#include "../../core/finite.h"
#include "../../core/half.h"
#include "../../core/philox.h"
#include "fused_backward_walk.cuh"

namespace mha::cuda {

// What is known of a query.
template <class Acc>
struct GradRow {
  // m; +inf where nothing has weight: rows that see nothing, and what fills up a tile. NaN where the row saw NaN.
  Acc shift;
  Acc inverse;  // 1 / l
  Acc delta;
};

template <class Acc>
struct GradTerms {
  Acc kept;  // P after dropout, not yet divided by 1 - p
  Acc logit_grad, score_grad;
};

// Of one entry, that is a query head.
template <class T>
struct GradRules {
  using Acc = accumulate_t<T>;
  static constexpr Acc kInfinity = static_cast<Acc>(__builtin_inf());

  const FusedBackward& p;
  BatchVisibility visibility;
  const T *bias, *grad_weights;  // null: none
  const Acc *row_max, *row_sum, *delta;
  Acc scale, softcap, hidden, unit, keep_scale;
  bool scaled;                      // logits are worked out; else they are the scores, and `unit` waits for the exponent
  uint32_t threshold, batch, head;  // of dropout; threshold 0: none
  uint64_t seed;

  __device__ GradRules(const FusedBackward& problem, int64_t entry)
      : p(problem),
        visibility(visibility_of(p.visibility, p.batch, entry, p.keys)),
        bias(p.bias ? matrix<const T>(p.batch, entry, p.bias) : nullptr),
        grad_weights(p.grad_weights ? matrix<const T>(p.batch, entry, p.grad_weights) : nullptr),
        row_max(matrix<const Acc>(p.batch, entry, p.row_max)),
        row_sum(matrix<const Acc>(p.batch, entry, p.row_sum)),
        delta(matrix<const Acc>(p.batch, entry, p.delta)),
        scale(to_finite<Acc>(p.scale)),
        softcap(softcap_in<Acc>(p.softcap)),
        hidden(to_finite<Acc>(p.mask_value)),
        keep_scale(p.dropout < 1 ? static_cast<Acc>(1 / (1 - p.dropout)) : Acc{0}),
        threshold(dropout_threshold(p.dropout)),
        batch(static_cast<uint32_t>(entry / p.heads)),
        head(static_cast<uint32_t>(entry % p.heads)),
        seed(threshold ? dropout_seed(p.seed) : 0) {
    const bool ordinary = p.scale > 1e-30 && p.scale < 1e30;
    scaled = p.softcap != 0 || p.bias || p.sinks || p.mask_value != -__builtin_inf() || !ordinary;
    unit = scaled ? Acc{1} : scale;
  }

  __device__ bool hidden_have_weight() const { return hidden != -kInfinity; }

  __device__ GradRow<Acc> row(int64_t query) const {
    if (query >= p.queries) return {kInfinity, 1, 0};
    const Acc m = row_max[query * p.row_max.row_stride], l = row_sum[query * p.row_sum.row_stride];
    return {l == 0 ? kInfinity : l - l == 0 ? m : l - l, l == 0 ? Acc{1} : 1 / l, delta[query * p.delta.row_stride]};
  }

  // Bit j: query `query` sees key `key` + j, of n.
  __device__ uint32_t seen_by_mask(int64_t query, int64_t key, int n) const {
    const bool* mask = visibility.mask + query * visibility.mask_row_stride + key * visibility.mask_col_stride;
    uint32_t bits = 0;
    for (int j = 0; j < n; ++j) bits |= uint32_t{mask[j * visibility.mask_col_stride]} << j;
    return bits;
  }

  __device__ Acc logit(int64_t query, int64_t key, Acc score) const {
    if (!scaled) return score;
    Acc x = score * scale;
    if (softcap != 0) x = softcap * tanh(x / softcap);
    if (bias) x += widen(bias[query * p.bias.row_stride + key * p.bias.col_stride]);
    return x;
  }

  // dx/ds = 1 - tanh(y)^2 = 4 e / (1 + e)^2 with e = e^(-2 |y|): right where 1 - tanh^2 would cancel.
  __device__ Acc slope(Acc score) const {
    if (softcap == 0) return 1;
    const Acc e = exp(-2 * abs(score * scale / softcap));
    return 4 * e / ((1 + e) * (1 + e));
  }

  // Bit j: dropout keeps the weight of key `key` + j, for the eight keys of a Philox block.
  __device__ uint32_t kept_keys(int64_t query, int64_t key) const {
    const PhiloxBlock block = dropout_block(seed, batch, head, static_cast<uint32_t>(query),
                                            static_cast<uint32_t>(key / kKeysPerBlock));
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < kKeysPerBlock; ++j) bits |= uint32_t{dropout_field(block, j) >= threshold} << j;
    return bits;
  }

  // `grad`: dO . V. Not for pairs without a key or a query.
  __device__ GradTerms<Acc> terms(const GradRow<Acc>& row, int64_t query, int64_t key, Acc score, Acc grad, bool seen,
                                  bool keep) const {
    const Acc x = seen ? logit(query, key, score) : hidden;
    const Acc weight = x == -kInfinity ? Acc{0} : exp((x - row.shift) * unit) * row.inverse;
    if (weight == 0) return {0, 0, 0};
    if (grad_weights)
      grad += widen(grad_weights[query * p.grad_weights.row_stride + key * p.grad_weights.col_stride]);
    grad = (keep ? grad * keep_scale : Acc{0}) - row.delta;
    // A hidden key's logit is a constant.
    const Acc logit_grad = seen ? weight * grad : Acc{0}, steepness = slope(score);
    return {keep ? weight : Acc{0}, logit_grad, steepness == 0 ? Acc{0} : logit_grad * steepness};
  }
};

}  // namespace mha::cuda
