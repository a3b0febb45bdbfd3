// How a sum over dimensions is cut into tasks. Follows from shapes and strides alone, so the order of additions, and
// with it every bit of the result, is the same for any number of threads.
#pragma once
#include "integers.h"
#include "problem.h"

namespace mha {

// Dimensions that remain and dimensions that are summed, neighbours merged where strides allow. One dimension is the
// inner one: where x has stride 1 if it has, so that memory is read in runs of up to kWidth elements.
//   inner kept:   a block of up to kWidth neighbouring results adds up runs (its terms)
//   inner summed: one result adds up runs, and then the run of their sums
struct SumPlan {
  static constexpr int64_t kWidth = 512;  // elements of a run: their sums stay in the first-level cache
  // Fewer blocks than kParts and the terms are shared out as well, into about as many tasks: an estimate of the threads
  // there may be. It cannot be asked, because the cut must not depend on it.
  static constexpr int64_t kParts = 16;
  static constexpr int64_t kPartSize = 16384;  // elements worth a task, some microseconds of additions: an estimate

  struct Dim {
    int64_t size, x_stride, out_stride;
    bool kept;
  };

  BatchShape kept, summed;  // without the inner dimension
  int64_t kept_x[kMaxBatchDims], kept_out[kMaxBatchDims], summed_x[kMaxBatchDims];
  Dim inner;
  int64_t pieces;  // runs that the inner dimension is cut into

  MHA_INLINE_MEMBER int64_t blocks() const { return kept.count() * (inner.kept ? pieces : 1); }
  MHA_INLINE_MEMBER int64_t terms() const { return summed.count() * (inner.kept ? 1 : pieces); }
  MHA_INLINE_MEMBER int64_t width() const { return min_of(inner.size, kWidth); }
  MHA_INLINE_MEMBER int64_t results_per_block() const { return inner.kept ? width() : 1; }
  MHA_INLINE_MEMBER int64_t parts() const {
    const int64_t wanted = blocks() ? ceil_div(kParts, blocks()) : 1;
    const int64_t most = min_of(terms() * width() / kPartSize, terms());
    return max_of(1, min_of(wanted, most));
  }
};

MHA_INLINE SumPlan sum_plan(const SumOver& p) {
  SumPlan::Dim dims[kMaxBatchDims + 1];
  int n = 0;
  for (int d = 0; d < p.shape.ndim; ++d) {
    const SumPlan::Dim dim{p.shape.size[d], p.x.batch_stride[d], p.out.batch_stride[d], p.out.batch_stride[d] != 0};
    if (dim.size == 1) continue;
    SumPlan::Dim* outer = n ? &dims[n - 1] : nullptr;
    if (outer && outer->kept == dim.kept && outer->x_stride == dim.size * dim.x_stride &&
        outer->out_stride == dim.size * dim.out_stride) {
      *outer = {outer->size * dim.size, dim.x_stride, dim.out_stride, dim.kept};
    } else {
      dims[n++] = dim;
    }
  }
  if (n == 0) dims[n++] = {1, 1, 0, false};

  int inner = n - 1;
  for (int d = n - 1; d >= 0 && dims[inner].x_stride != 1; --d)
    if (dims[d].x_stride == 1) inner = d;

  SumPlan plan;
  plan.inner = dims[inner];
  plan.pieces = ceil_div(plan.inner.size, SumPlan::kWidth);
  for (int d = 0; d < n; ++d) {
    if (d == inner) continue;
    BatchShape& shape = dims[d].kept ? plan.kept : plan.summed;
    if (dims[d].kept) plan.kept_out[shape.ndim] = dims[d].out_stride;
    (dims[d].kept ? plan.kept_x : plan.summed_x)[shape.ndim] = dims[d].x_stride;
    shape.size[shape.ndim++] = dims[d].size;
  }
  return plan;
}

// Elements of the accumulation type that SumOver::partials must hold; 0: no second phase.
MHA_INLINE int64_t sum_partials(const SumOver& p) {
  const SumPlan plan = sum_plan(p);
  return plan.parts() > 1 ? plan.blocks() * plan.parts() * plan.results_per_block() : 0;
}

}  // namespace mha
