// out = weights * keep / (1 - p), keep from the position alone (core/philox.h). A thread computes one Philox block,
// which serves kKeysPerBlock neighbouring keys.
#pragma once
#include "../../core/integers.h"
#include "../../core/philox.h"
#include "elements.cuh"

namespace mha::cuda {

constexpr int kDropoutThreads = 256;

// How the Philox blocks of all entries are cut into blocks of threads.
struct DropoutCut {
  int64_t in_row, in_entry, blocks_per_entry, blocks;

  static DropoutCut of(const Dropout& p) {
    DropoutCut cut;
    cut.in_row = ceil_div(p.cols, kKeysPerBlock);
    cut.in_entry = p.rows * cut.in_row;
    cut.blocks_per_entry = ceil_div(cut.in_entry, kDropoutThreads);
    cut.blocks = p.batch.count() * cut.blocks_per_entry;
    return cut;
  }
};

// What remains of weight `w`, whose 16-bit field is given. A dropped weight is 0 even where it was NaN.
template <class T>
__device__ __forceinline__ T kept(T w, uint32_t field, uint32_t threshold, accumulate_t<T> keep_scale) {
  return from_accumulate<T>(field >= threshold ? to_accumulate(w) * keep_scale : accumulate_t<T>{0});
}

// n neighbouring keys, kKeysPerBlock but at the end of a row.
template <class T>
__device__ __forceinline__ void drop(const T* w, int64_t w_stride, T* out, int64_t out_stride, int64_t n,
                                     const PhiloxBlock& random, uint32_t threshold, accumulate_t<T> keep_scale) {
  constexpr int N = sizeof(T) == 8 ? 2 : sizeof(T) == 4 ? 4 : 8;  // 16 bytes
  const bool as_runs = n >= kKeysPerBlock && w_stride == 1 && out_stride == 1 && starts_run<N>(w) && starts_run<N>(out);
#pragma unroll
  for (int j = 0; j < kKeysPerBlock; j += N) {
    T x[N] = {};
    if (as_runs) load_run(w + j, x);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (!as_runs && j + i < n) x[i] = w[(j + i) * w_stride];
      x[i] = kept(x[i], dropout_field(random, j + i), threshold, keep_scale);
      if (!as_runs && j + i < n) out[(j + i) * out_stride] = x[i];
    }
    if (as_runs) store_run(out + j, x);
  }
}

template <class T>
__global__ void __launch_bounds__(kDropoutThreads)
    dropout_kernel(const __grid_constant__ Dropout p, const __grid_constant__ DropoutCut cut) {
  const uint64_t seed = dropout_seed(p.seed);
  const int64_t heads = p.batch.size[p.batch.ndim - 1];
  for (int64_t block = blockIdx.x; block < cut.blocks; block += gridDim.x) {
    const int64_t entry = block / cut.blocks_per_entry;
    const int64_t index = (block - entry * cut.blocks_per_entry) * kDropoutThreads + threadIdx.x;
    if (index >= cut.in_entry) continue;
    const int64_t i = index / cut.in_row, key_block = index - i * cut.in_row, j = key_block * kKeysPerBlock;
    const int64_t batch = entry / heads, head = entry - batch * heads;
    const PhiloxBlock random = dropout_block(seed, static_cast<uint32_t>(batch), static_cast<uint32_t>(head),
                                             static_cast<uint32_t>(i), static_cast<uint32_t>(key_block));
    drop(matrix_of<const T>(p.batch, entry, p.weights) + i * p.weights.row_stride + j * p.weights.col_stride,
         p.weights.col_stride, matrix_of<T>(p.batch, entry, p.out) + i * p.out.row_stride + j * p.out.col_stride,
         p.out.col_stride, p.cols - j, random, dropout_threshold(p.p), static_cast<accumulate_t<T>>(1 / (1 - p.p)));
  }
}

}  // namespace mha::cuda
