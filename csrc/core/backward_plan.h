// How the backward of fused attention is cut into tasks and waves. Follows from the shape alone, so the order of
// additions, and with it every bit of the result, is the same for any number of threads.
#pragma once
#include "attention.h"
#include "bias_sharing.h"
#include "integers.h"

namespace mha {

// With enough key/value heads each of them is a task. With fewer, the keys of a head and its queries are cut into
// `ranges` parts each, and the launch makes as many waves: in wave t the task of key range c adds what query range
// (t - c) mod ranges contributes. No two tasks of a wave touch the same part of dQ, dK or dV, and the sums of every
// part grow in the order of the waves, in a workspace. (With causality there is nothing to do where the query range
// lies before the key range; t - c spreads these pairs evenly over the waves, c + t would not.)
//
// The gradient of the bias is found on the way, instead of in a pass of its own with two products more, where
// bias_on_the_way() allows it and it makes tasks enough. Heads that share its elements then make a series: a task goes
// through all of them and sums up in its own memory, which bounds the part of the bias that it may have. Otherwise each
// head is a series by itself.
struct BackwardPlan {
  static constexpr int64_t kTasks = 16;  // four each for four threads; as the products are cut
  // A range is a whole number of blocks of this many keys, and of this many queries.
  static constexpr int64_t kKeys = 128, kQueries = 256;
  static constexpr int64_t kWorkspaceBytes = 24 << 20;  // series that do not fit together come one after another
  // Elements of the bias that a task may sum up, about: 1 MB of floats. Whole blocks and groups may be more.
  static constexpr int64_t kBiasSums = 1 << 18;
  static constexpr int64_t kMostLanes = 16;  // of a vector, on any level

  int64_t series, series_length = 1;         // how many, and key/value heads of each
  int64_t ranges;                            // of one head
  int64_t at_once;                           // series in a wave
  int64_t query_sums, key_sums, value_sums;  // elements that the sums of one head take, at most
  bool has_bias = false;                     // its gradient is found on the way
  BiasSharing sharing;                       // if so: of key/value heads

  MHA_INLINE_MEMBER int64_t waves() const { return ceil_div(series, at_once) * ranges; }
  MHA_INLINE_MEMBER int64_t tasks() const { return at_once * ranges; }
  MHA_INLINE_MEMBER int64_t head_sums() const { return query_sums + key_sums + value_sums; }
  // Elements of the accumulation type that FusedBackward::workspace must hold.
  MHA_INLINE_MEMBER int64_t workspace() const { return ranges == 1 ? 0 : at_once * series_length * head_sums(); }

  MHA_INLINE_MEMBER int64_t series_bytes(const FusedBackward& p) const {
    return max_of(1, series_length * head_sums() * (p.dtype == DType::f64 ? 8 : 4));
  }
  MHA_INLINE_MEMBER bool bias_sums_fit(const FusedBackward& p, int64_t in_ranges) const {
    const int64_t sums = p.group * round_up(p.queries, kMostLanes) * p.keys / (in_ranges * in_ranges);
    return series_length == 1 || sums <= kBiasSums;
  }

  MHA_INLINE_MEMBER void cut(const FusedBackward& p) {
    const auto clamp = [](int64_t x, int64_t low, int64_t high) { return max_of(low, min_of(x, high)); };
    const int64_t most = clamp(ceil_div(p.keys, kKeys), 1, max_of(1, p.group * ceil_div(p.queries, kQueries)));
    int64_t least = 1;
    while (least < most && !bias_sums_fit(p, least)) ++least;
    at_once = clamp(series, 1, series);
    if (series < kTasks || least > 1) {
      at_once = clamp(kWorkspaceBytes / series_bytes(p), 1, at_once);
      at_once = ceil_div(max_of(1, series), ceil_div(max_of(1, series), at_once));  // the last wave as long as others
    }
    ranges = clamp(ceil_div(kTasks, at_once), least, most);
    if (ranges == 1) at_once = clamp(series, 1, series);
  }
};

// A tile of dS is a tile of the bias's gradient, except where softcap makes them differ. Where a row or a column sums
// it up, a task would need all keys or all queries; and a group's query heads do not make a series.
MHA_INLINE bool bias_on_the_way(const FusedBackward& p) {
  const bool wanted = p.grad_bias && (p.grad_query || p.grad_key || p.grad_value);
  if (!wanted || p.softcap != 0 || bias_has_one_row(p) || bias_has_one_column(p)) return false;
  return p.group == 1 || p.grad_bias.batch_stride[p.batch.ndim - 1] != 0;
}

// Whether five products in fewer tasks take less time than five and two in passes with more of them: products over
// tasks that run side by side, on the eight threads of a machine of middling size.
MHA_INLINE bool saves_time(const FusedBackward& p, const BackwardPlan& with_bias, const BackwardPlan& without) {
  constexpr int64_t kThreads = 8;
  const int64_t bias_tasks = BiasSharing::of(p, p.batch.ndim).matrices.count() *
                             ceil_div(p.queries, BackwardPlan::kQueries) * ceil_div(p.keys, 2 * BackwardPlan::kKeys);
  const auto side_by_side = [](int64_t tasks) { return static_cast<double>(min_of(kThreads, max_of(1, tasks))); };
  return 5 / side_by_side(with_bias.tasks()) <= 5 / side_by_side(without.tasks()) + 2 / side_by_side(bias_tasks);
}

MHA_INLINE BackwardPlan backward_plan(const FusedBackward& p) {
  // Kernels keep dQ in panels of at most 64 queries; rows are padded by up to 16 elements, numbers of rows to 32.
  const auto padded = [](int64_t n) { return round_up(n, 32); };
  BackwardPlan plan;
  plan.series = p.group > 0 ? p.batch.count() / p.group : 0;
  plan.query_sums = p.group * ceil_div(p.queries, 64) * (64 + 16) * padded(p.head_dim);
  plan.key_sums = padded(p.keys) * (padded(p.head_dim) + 16);
  plan.value_sums = padded(p.keys) * (padded(p.value_dim) + 16);
  plan.cut(p);
  if (!bias_on_the_way(p)) return plan;

  BackwardPlan with_bias = plan;
  with_bias.has_bias = true;
  with_bias.sharing = BiasSharing::of(p, p.batch.ndim - 1);
  with_bias.series = with_bias.sharing.matrices.count();
  with_bias.series_length = with_bias.sharing.sharing.count();
  with_bias.cut(p);
  const bool fits = with_bias.ranges == 1 || with_bias.series_bytes(p) <= BackwardPlan::kWorkspaceBytes;
  return fits && with_bias.bias_sums_fit(p, with_bias.ranges) && saves_time(p, with_bias, plan) ? with_bias : plan;
}

}  // namespace mha
