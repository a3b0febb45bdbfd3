// Sum over broadcast dimensions in a fixed order: the gradient of a bias has the bias's own shape.
//
// Each of the `results` is a sum of as many `terms`. A block of threads computes some neighbouring results, with
// `lanes` threads for each; a thread adds every lanes-th term, and then the lanes' sums are added pairwise. With few
// results the terms are cut into `parts` for different blocks; a second launch adds their sums in the same way.
#pragma once
#include "../../core/sum_plan.h"
#include "elements.cuh"

namespace mha::cuda {

constexpr int kSumThreads = 256;

// How a sum is cut. Follows from shapes and strides alone, and with it the order of additions.
struct SumCut {
  BatchShape kept, summed;
  int64_t kept_x[kMaxBatchDims] = {}, kept_out[kMaxBatchDims] = {}, summed_x[kMaxBatchDims] = {};
  int64_t results, terms, parts = 1, result_blocks;
  int lanes;
  bool neighbours_are_terms;  // neighbouring threads read neighbouring terms of one result; else the same term of
                              // neighbouring results

  int results_per_block() const { return kSumThreads / lanes; }

  static SumCut of(const SumOver& p) {
    SumCut cut;
    const SumPlan plan = sum_plan(p);
    cut.kept = plan.kept;
    cut.summed = plan.summed;
    for (int d = 0; d < plan.kept.ndim; ++d) {
      cut.kept_x[d] = plan.kept_x[d];
      cut.kept_out[d] = plan.kept_out[d];
    }
    for (int d = 0; d < plan.summed.ndim; ++d) cut.summed_x[d] = plan.summed_x[d];
    // The inner dimension, where x has stride 1 if it has, is the last of its kind.
    BatchShape& shape = plan.inner.kept ? cut.kept : cut.summed;
    (plan.inner.kept ? cut.kept_x : cut.summed_x)[shape.ndim] = plan.inner.x_stride;
    if (plan.inner.kept) cut.kept_out[shape.ndim] = plan.inner.out_stride;
    shape.size[shape.ndim++] = plan.inner.size;
    cut.results = cut.kept.count();
    cut.terms = cut.summed.count();
    cut.share_out(plan.inner.kept);
    return cut;
  }

  // The sums of parts: `parts` rows of `results` numbers in `partials`, to be added up.
  static SumCut of_partials(const SumCut& first) {
    SumCut cut = first;
    cut.summed = {};
    cut.summed.ndim = 1;
    cut.summed.size[0] = cut.terms = first.parts;
    cut.summed_x[0] = first.results;
    int64_t stride = 1;
    for (int d = cut.kept.ndim - 1; d >= 0; stride *= cut.kept.size[d--]) cut.kept_x[d] = stride;
    cut.share_out(true);
    cut.parts = 1;
    return cut;
  }

 private:
  void share_out(bool inner_kept) {
    // Blocks that keep some 130 multiprocessors busy, four each.
    constexpr int64_t kBlocks = 512;
    // Terms of a thread that pay for the additions of lanes and parts.
    constexpr int64_t kTermsOfThread = 16;
    neighbours_are_terms = !inner_kept;
    // Where neighbours are results, a warp reads at least its own width of them.
    const int most = inner_kept ? kSumThreads / 32 : kSumThreads;
    lanes = 1;
    while (lanes < most && lanes * kTermsOfThread < terms && results * lanes < kBlocks * kSumThreads) lanes *= 2;
    result_blocks = ceil_div(results, results_per_block());
    const int64_t wanted = result_blocks ? kBlocks / result_blocks : 1;
    parts = max_of(1, min_of(wanted, terms / (lanes * kTermsOfThread)));
  }
};

// Adds in two levels, so that n terms round about kTerms + n / kTerms times in a row instead of n times.
template <class Acc>
struct LongSum {
  static constexpr int kTerms = 64;  // makes that least for 4096 terms
  Acc inner = 0, outer = 0;
  int terms = 0;

  __device__ __forceinline__ void add(Acc x) {
    inner += x;
    if (++terms < kTerms) return;
    outer += inner;
    inner = 0;
    terms = 0;
  }
  __device__ __forceinline__ Acc total() const { return outer + inner; }
};

// x: the terms. The sums go to `partials` if it is not null, else to `out`.
template <class From, class To>
__global__ void __launch_bounds__(kSumThreads)
    sum_over_kernel(const __grid_constant__ SumCut cut, const From* x, To* out, accumulate_t<To>* partials) {
  using Acc = accumulate_t<To>;
  __shared__ Acc sums[kSumThreads];  // [lane][result]
  const int width = kSumThreads / cut.lanes, thread = threadIdx.x;
  const int lane = cut.neighbours_are_terms ? thread % cut.lanes : thread / width;
  const int column = cut.neighbours_are_terms ? thread / cut.lanes : thread % width;
  const int64_t blocks = cut.result_blocks * cut.parts;
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const int64_t part = block / cut.result_blocks, first = (block - part * cut.result_blocks) * width;
    LongSum<Acc> sum;
    if (first + column < cut.results) {
      const From* terms = x + element_offset(cut.kept, first + column, cut.kept_x);
      const int64_t end = cut.terms * (part + 1) / cut.parts;
#pragma unroll 4
      for (int64_t t = cut.terms * part / cut.parts + lane; t < end; t += cut.lanes)
        sum.add(to_accumulate(terms[element_offset(cut.summed, t, cut.summed_x)]));
    }
    sums[lane * width + column] = sum.total();
    for (int half = kSumThreads / 2; half >= width; half /= 2) {
      __syncthreads();
      if (thread < half) sums[thread] += sums[thread + half];
    }
    __syncthreads();
    const int64_t result = first + thread;
    if (thread < width && result < cut.results) {
      if (partials) partials[part * cut.results + result] = sums[thread];
      else out[element_offset(cut.kept, result, cut.kept_out)] = from_accumulate<To>(sums[thread]);
    }
    __syncthreads();  // sums may be written again
  }
}

}  // namespace mha::cuda
