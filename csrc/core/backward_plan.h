// How the backward of fused attention is cut into tasks and waves. Follows from the shape alone, so the order of
// additions, and with it every bit of the result, is the same for any number of threads.
#pragma once
#include "attention.h"
#include "integers.h"

namespace mha {

// With enough key/value heads each of them is a task. With fewer, the keys of a head and its queries are cut into
// `ranges` parts each, and the launch makes as many waves: in wave t the task of key range c adds what query range
// (t - c) mod ranges contributes. No two tasks of a wave touch the same part of dQ, dK or dV, and the sums of every
// part grow in the order of the waves, in a workspace. (With causality there is nothing to do where the query range
// lies before the key range; t - c spreads these pairs evenly over the waves, c + t would not.)
struct BackwardPlan {
  static constexpr int64_t kTasks = 16;  // four each for four threads; as the products are cut
  // A range is a whole number of blocks of this many keys, and of this many queries.
  static constexpr int64_t kKeys = 128, kQueries = 256;
  static constexpr int64_t kWorkspaceBytes = 24 << 20;  // heads that do not fit together take turns

  int64_t heads;                             // key/value heads, all batch entries together
  int64_t ranges;                            // of one head
  int64_t at_once;                           // heads in a wave
  int64_t query_sums, key_sums, value_sums;  // elements that the sums of one head take, at most

  MHA_INLINE_MEMBER int64_t waves() const { return ceil_div(heads, at_once) * ranges; }
  MHA_INLINE_MEMBER int64_t head_sums() const { return query_sums + key_sums + value_sums; }
  // Elements of the accumulation type that FusedBackward::workspace must hold.
  MHA_INLINE_MEMBER int64_t workspace() const { return ranges == 1 ? 0 : at_once * head_sums(); }
};

MHA_INLINE BackwardPlan backward_plan(const FusedBackward& p) {
  const auto clamp = [](int64_t x, int64_t low, int64_t high) { return max_of(low, min_of(x, high)); };
  // Kernels keep dQ in panels of at most 64 queries; rows are padded by up to 16 elements, numbers of rows to 32.
  const auto padded = [](int64_t n) { return round_up(n, 32); };
  BackwardPlan plan;
  plan.heads = p.group > 0 ? p.batch.count() / p.group : 0;
  plan.query_sums = p.group * ceil_div(p.queries, 64) * (64 + 16) * padded(p.head_dim);
  plan.key_sums = padded(p.keys) * (padded(p.head_dim) + 16);
  plan.value_sums = padded(p.keys) * (padded(p.value_dim) + 16);
  const int64_t bytes = plan.head_sums() * (p.dtype == DType::f64 ? 8 : 4);
  const bool whole_heads = plan.heads >= BackwardPlan::kTasks;
  plan.at_once = whole_heads ? plan.heads : clamp(BackwardPlan::kWorkspaceBytes / (bytes + 1), 1, plan.heads);
  plan.ranges = clamp(ceil_div(BackwardPlan::kTasks, plan.at_once), 1, ceil_div(p.keys, BackwardPlan::kKeys));
  plan.ranges = clamp(plan.ranges, 1, p.group * ceil_div(p.queries, BackwardPlan::kQueries));
  if (plan.ranges == 1) plan.at_once = clamp(plan.heads, 1, plan.heads);
  return plan;
}

}  // namespace mha
