// Fused attention: what one call computes. The three steps over tiles, without the matrix of scores.
#pragma once
#include "problem.h"

namespace mha {

// O = dropout(softmax(x)) V,  x = softcap * tanh(scale * Q K^T / softcap) + bias, hidden keys get mask_value.
struct Attention {
  DType dtype = DType::f32;
  // (*, kv_heads, group): an entry is a query head, and the `group` entries next to each other share a key/value head
  // (key and value have stride 0 in the last dimension).
  BatchShape batch;
  int64_t group = 1;
  int64_t heads = 1;  // query heads: dropout counts (batch, head) as (entry / heads, entry % heads)
  int64_t queries = 0, keys = 0, head_dim = 0, value_dim = 0;

  Input query;       // row = query, col = head_dim
  Input key, value;  // row = key
  Input bias;        // row = query, col = key
  Input sinks;       // one per entry: a logit that enters the denominator only
  Visibility visibility;

  double scale = 1.0;
  double softcap = 0.0;           // 0: none
  double mask_value = 0.0;        // -inf: hidden keys have no weight
  double dropout = 0.0;           // probability; 0: none, and the seed is of no account
  const int64_t* seed = nullptr;  // 64 random bits, where the tensors are

  double work() const { return 2.0 * batch.count() * queries * keys * (head_dim + value_dim); }
};

// What the backward needs of each query row, in the accumulation type. Kept apart, because their logarithm would lose
// what distinguishes large logits: P = exp(x - row_max) / row_sum.
//   row_max   max of x over all keys with weight and the sink; -inf where there are none. Where no option asks for
//             logits it is the max of the products, unscaled (`unit` in cpu/kernels/fused_logits.inl) or in base 2
//             (cuda/kernels/fused_logits.cuh)
//   row_sum   sum of exp(x - row_max), the sink's term included; 0 where there are none
struct FusedForward : Attention {
  Output output;            // row = query, col = value_dim
  Output weights;           // optional; row = query, col = key; after dropout
  bool average = false;     // all heads of a batch entry share their weights (stride 0), which are the mean over them
  Output row_max, row_sum;  // optional, both or neither; one per query
  // Room for the results of parts of the keys; null: no part is split off. fused_plan.h (CPU) and cuda/launch.h say how
  // much.
  void* partials = nullptr;
};

// dP = dO V^T + dW, where dW is the gradient of the returned weights, both through dropout;
// dx = P (dP - delta), delta = sum_j P dP = dO . O + sum_j W dW.
struct FusedBackward : Attention {
  Input output, grad_output;  // row = query, col = value_dim
  Input grad_weights;         // optional; row = query, col = key
  Input weights;              // with grad_weights, likewise; on CPU they may be missing, and are worked out anew
  Input row_max, row_sum;     // one per query
  Output delta;               // one per query, accumulation type: written by the first phase, read by the others
  Output grad_query, grad_key, grad_value;  // each optional
  Output grad_sink_rows;                    // optional; one per query, accumulation type: -p_s delta
  Output grad_bias;                         // optional; stride 0 where the bias is broadcast: summed there
  // For grad_query, grad_key and grad_value. CPU: the wave at hand, and room for sums that go on from one wave to the
  // next (backward_plan.h). CUDA: room for what is known of the queries (cuda/launch.h).
  int64_t wave = 0;
  void* workspace = nullptr;

  double work() const { return 2.0 * batch.count() * queries * keys * (3 * head_dim + 2 * value_dim); }
};

}  // namespace mha
