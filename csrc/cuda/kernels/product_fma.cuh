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

// Elements of a step on the way from memory to shared memory: those of a thread are `gap` apart, along the depth or the
// other index. Neighbouring threads take neighbours in memory.
template <class T>
struct FmaLoads {
  const bool along_depth;
  const int outer, depth, outer_gap, depth_gap, count;
  const int64_t gap;
  const T* p;  // the thread's first element
  T x[kFmaLoads];

  __device__ __forceinline__ explicit FmaLoads(const Factor<T>& f)
      : along_depth(f.depth_stride == 1 || f.stride != 1),
        outer(along_depth ? threadIdx.x / kFmaDepth : threadIdx.x % kFmaTile),
        depth(along_depth ? threadIdx.x % kFmaDepth : threadIdx.x / kFmaTile),
        outer_gap(along_depth ? kFmaThreads / kFmaDepth : 0),
        depth_gap(along_depth ? 0 : kFmaThreads / kFmaTile),
        count(f.count),
        gap(outer_gap * f.stride + depth_gap * f.depth_stride),
        p(f.p + outer * f.stride + depth * f.depth_stride) {}

  __device__ __forceinline__ void load(int depth_of_step) {
    const T* at = p;
#pragma unroll
    for (int i = 0; i < kFmaLoads; ++i, at += gap)
      x[i] = outer + i * outer_gap < count && depth + i * depth_gap < depth_of_step ? *at : T{0};
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
    T* at = &step.at[depth][outer];
    const int step_gap = depth_gap * kFmaPitch + outer_gap;
#pragma unroll
    for (int i = 0; i < kFmaLoads; ++i, at += step_gap) *at = x[i];
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

  // Terms whose factor of B was replaced, as far as they are visible. `a` is the step in shared memory.
  __device__ __forceinline__ void add_visible(const ProductTile<T>& tile, const DepthStep<kFmaDepth>& step,
                                              const FmaStep<T>& a) {
    const int depth = step.depth(tile.p);
#pragma unroll 1
    for (int k = 0; k < depth; ++k) {
      T left[kFmaThread];
      a.read(k, row, left);
#pragma unroll
      for (int j = 0; j < kFmaThread; ++j) {
        if (col + j >= tile.cols) break;
        const T right = step.b(tile, col + j)[k * tile.p.b.row_stride];
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
    const auto factor_a = Factor<T>::a_of(tile), factor_b = Factor<T>::b_of(tile);
    FmaSums<T> sums;
    FmaLoads<T> a(factor_a), b(factor_b);
    DepthStep<kFmaDepth> step;
    if (!step.is_past_end(p)) {
      a.load(step.depth(p));
      b.load(step.depth(p));
    }
    for (int half = 0; !step.is_past_end(p); half ^= 1) {
      const bool replaced = p.zero_hides && b.make_finite();
      a.store(step_a[half]);
      b.store(step_b[half]);
      const bool look_again = step_is_there(p.zero_hides, replaced);
      const DepthStep<kFmaDepth> next = step.next(p);
      if (!next.is_past_end(p)) {
        a.p += factor_a.distance(step, next);
        b.p += factor_b.distance(step, next);
        a.load(next.depth(p));
        b.load(next.depth(p));
      }
      sums.add(step_a[half], step_b[half]);
      if (look_again) sums.add_visible(tile, step, step_a[half]);
      step = next;
    }
    sums.write(p, tile);
    __syncthreads();  // the steps may be written again
  }
}

}  // namespace mha::cuda
