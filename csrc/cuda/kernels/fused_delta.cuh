// The first phase of the fused backward, one warp for a query row:
//   delta = sum_j P_j dP_j = dO . O + sum_j W_j dW_j       W: the returned weights; terms whose O or W is 0 are skipped
//   dsink = -p_s delta,  p_s = e^(sink - m) / l
// With it the kernels that follow get by without a row of P and dP in one place.
#pragma once
#include "../../core/half.h"
#include "../../core/strides.h"
#include "fused_backward_call.cuh"

namespace mha::cuda {

constexpr int kDeltaThreads = 256;
// That a multiprocessor must have room for: more would leave too few registers, and values would be spilt.
template <class T>
constexpr int kDeltaBlocks = sizeof(T) == 8 ? 4 : 5;
constexpr int kDeltaRows = kDeltaThreads / 32;  // of a block, a warp each

// Sum over the elements of two rows, lane by lane. Where a is 0 the term is, whatever b holds.
template <class T>
__device__ accumulate_t<T> skipping_product(const T* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t n,
                                            int lane) {
  accumulate_t<T> sum = 0;
  for (int64_t j = lane; j < n; j += 32) {
    const accumulate_t<T> x = to_accumulate(a[j * a_stride]);
    if (x != 0) sum += x * to_accumulate(b[j * b_stride]);
  }
  return sum;
}

template <class T>
__device__ accumulate_t<T> skipping_product(const BatchShape& batch, int64_t entry, const Input& a, const Input& b,
                                            int64_t row, int64_t n, int lane) {
  return skipping_product(matrix<const T>(batch, entry, a) + row * a.row_stride, a.col_stride,
                          matrix<const T>(batch, entry, b) + row * b.row_stride, b.col_stride, n, lane);
}

// Rows of an entry: those that fill up its last tile included, where tiles are wanted.
template <class Acc>
MHA_INLINE int64_t delta_rows(const GradCall<Acc>& call) {
  return call.rows ? round_up(call.p.queries, kGradTile) : call.p.queries;
}

template <class T>
__global__ void __launch_bounds__(kDeltaThreads, kDeltaBlocks<T>)
    fused_delta(const __grid_constant__ GradCall<accumulate_t<T>> call) {
  using Acc = accumulate_t<T>;
  const FusedBackward& p = call.p;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t flat = int64_t{blockIdx.x} * kDeltaRows + threadIdx.x / 32;
  const int64_t rows = delta_rows(call), entry = flat / rows, row = flat - entry * rows;
  if (entry >= p.batch.count()) return;
  if (row >= p.queries) {
    if constexpr (!std::is_same_v<Acc, double>)
      if (lane == 0) GradRowTiles{call.rows, p.queries}.write(entry, row, GradRow<float>::none());
    return;
  }

  Acc sum = skipping_product<T>(p.batch, entry, p.output, p.grad_output, row, p.value_dim, lane);
  if (p.grad_weights) sum += skipping_product<T>(p.batch, entry, p.weights, p.grad_weights, row, p.keys, lane);
  for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, other);
  if (lane != 0) return;

  matrix<Acc>(p.batch, entry, p.delta)[row * p.delta.row_stride] = sum;
  if (!call.rows && !p.grad_sink_rows) return;
  const Acc m = matrix<const Acc>(p.batch, entry, p.row_max)[row * p.row_max.row_stride];
  const Acc l = matrix<const Acc>(p.batch, entry, p.row_sum)[row * p.row_sum.row_stride];
  if constexpr (!std::is_same_v<Acc, double>)
    if (call.rows) GradRowTiles{call.rows, p.queries}.write(entry, row, GradRow<float>::of(m, l, sum));
  if (!p.grad_sink_rows) return;
  const Acc sink = to_accumulate(*matrix<const T>(p.batch, entry, p.sinks));
  const Acc weight = l == 0 ? Acc{0} : RowShift<Acc>::of(m, true).weight(sink, call.logits.c) / l;
  matrix<Acc>(p.batch, entry, p.grad_sink_rows)[row * p.grad_sink_rows.row_stride] = weight == 0 ? 0 : -weight * sum;
}

}  // namespace mha::cuda
