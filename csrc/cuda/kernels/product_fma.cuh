// The product of float and double by fused multiply-adds: a thread keeps 4 x 4 sums in registers.
#pragma once
#include "product.cuh"

namespace mha::cuda {

// 64 x 64 sums for 256 threads of 4 x 4: for 16 multiply-adds a thread reads 4 + 4 elements of shared memory, which its
// neighbours share, so that both take about the same time. 16 of the depth: two steps of double fit 48 KB.
constexpr int kFmaTile = 64, kFmaDepth = 16, kFmaThread = 4, kFmaThreads = 256;
constexpr int kFmaAcross = kFmaTile / kFmaThread;              // threads side by side
constexpr int kFmaLoads = kFmaTile * kFmaDepth / kFmaThreads;  // elements of a factor per thread and step
// Four elements more than a row needs: elements that neighbouring threads store one below the other spread over the
// banks, and rows stay aligned for reads of four.
constexpr int kFmaPitch = kFmaTile + 4;

// Elements of 16 bytes.
template <class T>
constexpr int kFmaRun = 16 / sizeof(T);

// A step of one factor in shared memory, depth by depth.
template <class T>
struct FmaStep {
  alignas(16) T at[kFmaDepth][kFmaPitch];

  // Elements o .. o+3 of depth k.
  __device__ __forceinline__ void read(int k, int o, T (&x)[kFmaThread]) const {
#pragma unroll
    for (int i = 0; i < kFmaThread; i += kFmaRun<T>) {
      T run[kFmaRun<T>];
      load_run(&at[k][o + i], run);
#pragma unroll
      for (int r = 0; r < kFmaRun<T>; ++r) x[i + r] = run[r];
    }
  }
};

// Elements of a step on the way from memory to shared memory. Neighbouring threads take neighbours in memory.
template <class T>
struct FmaLoads {
  const bool along_depth;
  T x[kFmaLoads];

  __device__ __forceinline__ FmaLoads(int64_t stride, int64_t depth_stride)
      : along_depth(depth_stride == 1 || stride != 1) {}

  __device__ static __forceinline__ int index(int i) { return threadIdx.x + i * kFmaThreads; }
  __device__ __forceinline__ int outer(int i) const { return along_depth ? index(i) / kFmaDepth : index(i) % kFmaTile; }
  __device__ __forceinline__ int depth(int i) const { return along_depth ? index(i) % kFmaDepth : index(i) / kFmaTile; }

  __device__ __forceinline__ void load(const Factor<T>& f) {
#pragma unroll
    for (int i = 0; i < kFmaLoads; ++i)
      x[i] = outer(i) < f.count && depth(i) < f.depth ? *f.at(outer(i), depth(i)) : T{0};
  }

  // Zeros for NaN and infinities. Returns whether there were any.
  __device__ __forceinline__ bool make_finite() {
    bool replaced = false;
#pragma unroll
    for (int i = 0; i < kFmaLoads; ++i)
      if (!is_finite(x[i])) {
        x[i] = 0;
        replaced = true;
      }
    return replaced;
  }

  __device__ __forceinline__ void store(FmaStep<T>& step) const {
#pragma unroll
    for (int i = 0; i < kFmaLoads; ++i) step.at[depth(i)][outer(i)] = x[i];
  }
};

// The sums of one thread: rows row.., columns col.. of the tile.
template <class T>
struct FmaSums {
  T sum[kFmaThread][kFmaThread] = {};
  const int row = threadIdx.x / kFmaAcross * kFmaThread, col = threadIdx.x % kFmaAcross * kFmaThread;

  __device__ __forceinline__ void add(const FmaStep<T>& a, const FmaStep<T>& b) {
#pragma unroll
    for (int k = 0; k < kFmaDepth; ++k) {
      T left[kFmaThread], right[kFmaThread];
      a.read(k, row, left);
      b.read(k, col, right);
#pragma unroll
      for (int i = 0; i < kFmaThread; ++i)
#pragma unroll
        for (int j = 0; j < kFmaThread; ++j) sum[i][j] += left[i] * right[j];
    }
  }

  // Terms whose factor of B was replaced, as far as they are visible. `b` is the step in memory.
  __device__ __forceinline__ void add_visible(const FmaStep<T>& a, const Factor<T>& b) {
#pragma unroll 1
    for (int k = 0; k < kFmaDepth && k < b.depth; ++k) {
      T left[kFmaThread];
      a.read(k, row, left);
#pragma unroll
      for (int j = 0; j < kFmaThread; ++j) {
        const T right = col + j < b.count ? *b.at(col + j, k) : T{0};
        if (is_finite(right)) continue;
#pragma unroll
        for (int i = 0; i < kFmaThread; ++i)
          if (left[i] != 0) sum[i][j] += left[i] * right;
      }
    }
  }

  __device__ __forceinline__ void write(const Product& p, const ProductTile<T>& tile) const {
    const T alpha = to_finite<T>(p.alpha);
#pragma unroll
    for (int i = 0; i < kFmaThread; ++i) {
      if (row + i >= tile.rows) return;
      T* out = tile.c + (row + i) * p.c.row_stride + col * p.c.col_stride;
      const bool as_runs = p.c.col_stride == 1 && col + kFmaThread <= tile.cols && starts_run<kFmaRun<T>>(out);
#pragma unroll
      for (int j = 0; j < kFmaThread; j += kFmaRun<T>) {
        T run[kFmaRun<T>];
#pragma unroll
        for (int r = 0; r < kFmaRun<T>; ++r) run[r] = alpha * sum[i][j + r];
        if (as_runs) {
          store_run(out + j, run);
        } else {
#pragma unroll
          for (int r = 0; r < kFmaRun<T>; ++r)
            if (col + j + r < tile.cols) out[(j + r) * p.c.col_stride] = run[r];
        }
      }
    }
  }
};

template <class T>
__global__ void __launch_bounds__(kFmaThreads, 2)
    product_fma_kernel(const __grid_constant__ Product p, const __grid_constant__ ProductCut cut) {
  // Two steps: one is written while slower threads still read the other, so that a step needs only one barrier.
  __shared__ FmaStep<T> step_a[2], step_b[2];
  for (int64_t block = blockIdx.x; block < cut.blocks; block += gridDim.x) {
    const ProductTile<T> tile(p, cut, block, kFmaTile, kFmaTile);
    FmaSums<T> sums;
    FmaLoads<T> a(p.a.row_stride, p.a.col_stride), b(p.b.col_stride, p.b.row_stride);
    DepthStep<kFmaDepth> step;
    if (!step.is_past_end(p)) {
      a.load(step.of_a(tile));
      b.load(step.of_b(tile));
    }
    for (int half = 0; !step.is_past_end(p); half ^= 1) {
      const bool replaced = p.zero_hides && b.make_finite();
      a.store(step_a[half]);
      b.store(step_b[half]);
      const bool look_again = step_is_there(p.zero_hides, replaced);
      const DepthStep<kFmaDepth> next = step.next(p);
      if (!next.is_past_end(p)) {
        a.load(next.of_a(tile));
        b.load(next.of_b(tile));
      }
      sums.add(step_a[half], step_b[half]);
      if (look_again) sums.add_visible(step_a[half], step.of_b(tile));
      step = next;
    }
    sums.write(p, tile);
    __syncthreads();  // the steps may be written again
  }
}

}  // namespace mha::cuda
