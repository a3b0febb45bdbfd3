// How fused attention cuts the keys into parts, so that few queries of few heads make enough tasks. Follows from shapes
// alone: not from the number of threads and not from the instruction set, so that the order of additions, and the
// memory that a call needs, are known to everyone.
#pragma once
#include "attention.h"
#include "integers.h"

namespace mha {

struct FusedPlan {
  // Tasks that are wanted. An estimate of what threads there may be; it cannot be asked, see above.
  static constexpr int64_t kTasks = 32;
  // Queries of a head that no task divides: as many as the widest panel has lanes.
  static constexpr int64_t kQueries = 64;
  // Up to this number of queries, all query heads of a key/value head may share one pass over its keys.
  static constexpr int64_t kFewQueries = 8;
  // Keys and values of a part, in elements: some ten microseconds of memory. A part's results are value_dim + 2
  // elements a query, so that merging them is next to nothing.
  static constexpr int64_t kPartElements = 65536;

  int64_t parts = 1;
  int64_t rows = 0;  // queries of all entries

  MHA_INLINE_MEMBER static FusedPlan of(const FusedForward& p) {
    FusedPlan plan;
    const int64_t entries = p.batch.count(), blocks = ceil_div(p.queries, kQueries);
    plan.rows = entries * p.queries;
    // A returned weight needs the sum over all keys before it can be written.
    if (p.weights || plan.rows == 0) return plan;
    const int64_t tasks = p.queries <= kFewQueries ? entries / p.group : entries * blocks;
    const int64_t most = p.keys * (p.head_dim + p.value_dim) / kPartElements;
    plan.parts = max_of(1, min_of(ceil_div(kTasks, tasks), most));
    return plan;
  }
};

// Elements of the accumulation type that FusedForward::partials must hold; 0: no second phase. A part of a row takes
// value_dim + 2: the output not yet divided by the sum, the maximum and the sum.
MHA_INLINE int64_t fused_partials(const FusedForward& p) {
  const FusedPlan plan = FusedPlan::of(p);
  return plan.parts > 1 ? plan.rows * plan.parts * (p.value_dim + 2) : 0;
}

}  // namespace mha
