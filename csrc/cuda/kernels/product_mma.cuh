// The product of the 16-bit types by tensor cores, with sums in float.
//
// A step of a factor lies in shared memory as it does in memory, with the depth or the other index contiguous, so that
// runs of 16 bytes are copied as they are; ldmatrix then reads it as it stands or transposed.
#pragma once
#include "../primitives.cuh"
#include "product.cuh"

namespace mha::cuda {

// 128 x 64 sums for 8 warps of 32 x 32: 32 registers a thread, and for 8 tensor instructions a warp reads 4 x 4
// matrices. 64 columns: many a head_dim is no larger. 32 of the depth: two steps take 24 KB, and what is on the way 12
// registers.
constexpr int kMmaRows = 128, kMmaCols = 64, kMmaDepth = 32;
constexpr int kMmaWarpRows = 32, kMmaWarpCols = 32, kMmaWarpsAcross = kMmaCols / kMmaWarpCols;
constexpr int kMmaThreads = kMmaRows / kMmaWarpRows * kMmaWarpsAcross * 32;
constexpr int kMmaRun = 8, kMmaRunBytes = 16;  // elements of a run, and its size

// Where the elements of a step of kCount x kMmaDepth stand in shared memory. Rows of runs; the place of a run in its
// row is permuted by the row, so that eight runs one below the other, which ldmatrix reads at a time, lie in different
// banks. Along the depth a row has 4 runs, and two rows fill the 32 banks.
template <int kCount, bool kAlongDepth>
struct MmaStep {
  static constexpr int kRowRuns = (kAlongDepth ? kMmaDepth : kCount) / kMmaRun;
  static constexpr int kRuns = kCount * kMmaDepth / kMmaRun, kBytes = kRuns * kMmaRunBytes;

  __device__ static __forceinline__ int run_offset(int row, int run) {
    const int place = kAlongDepth ? run ^ (row >> 1 & 3) : run ^ (row & 7);
    return (row * kRowRuns + place) * kMmaRunBytes;
  }
  // Of the run that holds element (o, k).
  __device__ static __forceinline__ int offset(int o, int k) {
    return kAlongDepth ? run_offset(o, k / kMmaRun) : run_offset(k, o / kMmaRun);
  }

  // Four matrices of 8 x 8 from (o, k) on, 16 x 16 elements. kDepthFirst: the second one is 8 deeper than the first,
  // else 8 further along o; the third and fourth follow in the other direction. Fragments have the depth in a register.
  template <bool kDepthFirst>
  __device__ static __forceinline__ void fragments(uint32_t step, int o, int k, uint32_t (&r)[4]) {
    const int lane = threadIdx.x % 32;
    const int second = lane >> 3 & 1, third = lane >> 4;
    const int further = kDepthFirst ? third : second, deeper = kDepthFirst ? second : third;
    if (kAlongDepth) {
      load_matrices(r, step + offset(o + (lane & 7) + 8 * further, k + 8 * deeper));
    } else {
      load_matrices_transposed(r, step + offset(o + 8 * further, k + (lane & 7) + 8 * deeper));
    }
  }
};

// n elements from p on, p[stride] apart, zeros after them.
template <class T>
__device__ __forceinline__ void load_elements(const T* p, int64_t stride, int n, T (&x)[kMmaRun]) {
  if (n >= kMmaRun && stride == 1 && starts_run<kMmaRun>(p)) return load_run(p, x);
#pragma unroll
  for (int i = 0; i < kMmaRun; ++i) x[i] = i < n ? p[i * stride] : T{0};
}

// NaN or infinite: all bits of the exponent.
__device__ __forceinline__ bool is_finite(bfloat16 x) { return (x.bits & 0x7F80u) != 0x7F80u; }
__device__ __forceinline__ bool is_finite(float16 x) { return (x.bits & 0x7C00u) != 0x7C00u; }

// Runs of a step on the way from memory to shared memory.
template <class T, int kCount, bool kAlongDepth>
struct MmaLoads {
  using Step = MmaStep<kCount, kAlongDepth>;
  static constexpr int kLoads = Step::kRuns / kMmaThreads;
  T x[kLoads][kMmaRun];

  __device__ static __forceinline__ int row(int i) { return (threadIdx.x + i * kMmaThreads) / Step::kRowRuns; }
  __device__ static __forceinline__ int run(int i) { return (threadIdx.x + i * kMmaThreads) % Step::kRowRuns; }

  __device__ __forceinline__ void load(const Factor<T>& f) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int across = row(i), along = run(i) * kMmaRun;
      if (kAlongDepth) {
        load_elements(f.at(across, along), f.depth_stride, across < f.count ? f.depth - along : 0, x[i]);
      } else {
        load_elements(f.at(along, across), f.stride, across < f.depth ? f.count - along : 0, x[i]);
      }
    }
  }

  // Zeros for NaN and infinities. Returns whether there were any.
  __device__ __forceinline__ bool make_finite() {
    bool replaced = false;
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
#pragma unroll
      for (int e = 0; e < kMmaRun; ++e)
        if (!is_finite(x[i][e])) {
          x[i][e] = T{0};
          replaced = true;
        }
    return replaced;
  }

  __device__ __forceinline__ void store(unsigned char* step) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      store_run_shared(reinterpret_cast<T*>(step + Step::run_offset(row(i), run(i))), x[i]);
  }
};

// The sums of one thread, as the tensor instruction lays them out (primitives.cuh).
template <class T>
struct MmaSums {
  static constexpr int kTilesDown = kMmaWarpRows / 16, kTilesAcross = kMmaWarpCols / 8;
  float sum[kTilesDown][kTilesAcross][4] = {};

  __device__ static __forceinline__ int warp_row() { return threadIdx.x / 32 / kMmaWarpsAcross * kMmaWarpRows; }
  __device__ static __forceinline__ int warp_col() { return threadIdx.x / 32 % kMmaWarpsAcross * kMmaWarpCols; }
  __device__ static __forceinline__ int row(int down, int half) {
    return warp_row() + 16 * down + 8 * half + threadIdx.x % 32 / 4;
  }
  __device__ static __forceinline__ int col(int across) { return warp_col() + 8 * across + threadIdx.x % 4 * 2; }

  template <class StepA, class StepB>
  __device__ __forceinline__ void add(uint32_t a, uint32_t b) {
#pragma unroll
    for (int k = 0; k < kMmaDepth; k += 16) {
      uint32_t left[kTilesDown][4];
#pragma unroll
      for (int down = 0; down < kTilesDown; ++down)
        StepA::template fragments<false>(a, warp_row() + 16 * down, k, left[down]);
#pragma unroll
      for (int across = 0; across < kTilesAcross; across += 2) {
        uint32_t right[4];
        StepB::template fragments<true>(b, warp_col() + 8 * across, k, right);
#pragma unroll
        for (int down = 0; down < kTilesDown; ++down) {
          mma<T>(sum[down][across], left[down], right[0], right[1]);
          mma<T>(sum[down][across + 1], left[down], right[2], right[3]);
        }
      }
    }
  }

  // Terms whose factor of B was replaced, as far as they are visible. `a` and `b` are the step in memory.
  __device__ __forceinline__ void add_visible(const Factor<T>& a, const Factor<T>& b) {
#pragma unroll 1
    for (int k = 0; k < kMmaDepth && k < b.depth; ++k)
#pragma unroll
      for (int across = 0; across < kTilesAcross; ++across)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (col(across) + e >= b.count) continue;
          const T right = *b.at(col(across) + e, k);
          if (is_finite(right)) continue;
#pragma unroll
          for (int down = 0; down < kTilesDown; ++down)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int i = row(down, half);
              const float left = i < a.count ? to_accumulate(*a.at(i, k)) : 0.0f;
              if (left != 0) sum[down][across][2 * half + e] += left * to_accumulate(right);
            }
        }
  }

  // Through shared memory, so that whole rows of the tile go to memory at once.
  __device__ __forceinline__ void write(const Product& p, const ProductTile<T>& tile, unsigned char* room) const {
    using Rows = MmaStep<kMmaCols, false>;  // a row of 64 elements; here the rows are those of C
    const float alpha = to_finite<float>(p.alpha);
    const uint32_t staged = shared_address(room);
#pragma unroll
    for (int down = 0; down < kTilesDown; ++down)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int across = 0; across < kTilesAcross; ++across) {
          const float* x = &sum[down][across][2 * half];
          store_shared(staged + Rows::run_offset(row(down, half), warp_col() / kMmaRun + across) + threadIdx.x % 4 * 4,
                       pack<T>(alpha * x[0], alpha * x[1]));
        }
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x; i < kMmaRows * Rows::kRowRuns; i += kMmaThreads) {
      const int r = i / Rows::kRowRuns, run = i % Rows::kRowRuns;
      const int n = r < tile.rows ? tile.cols - run * kMmaRun : 0;
      T x[kMmaRun];
      load_run(reinterpret_cast<const T*>(room + Rows::run_offset(r, run)), x);
      T* out = tile.c + r * p.c.row_stride + run * kMmaRun * p.c.col_stride;
      if (n >= kMmaRun && p.c.col_stride == 1 && starts_run<kMmaRun>(out)) {
        store_run(out, x);
      } else {
#pragma unroll
        for (int e = 0; e < kMmaRun; ++e)
          if (e < n) out[e * p.c.col_stride] = x[e];
      }
    }
  }
};

template <class T, bool kADepth, bool kBDepth>
__global__ void __launch_bounds__(kMmaThreads, 2)
    product_mma_kernel(const __grid_constant__ Product p, const __grid_constant__ ProductCut cut) {
  using LoadsA = MmaLoads<T, kMmaRows, kADepth>;
  using LoadsB = MmaLoads<T, kMmaCols, kBDepth>;
  using StepA = typename LoadsA::Step;
  using StepB = typename LoadsB::Step;
  // Two steps: one is written while slower threads still read the other, so that a step needs only one barrier.
  constexpr int kStep = StepA::kBytes + StepB::kBytes;
  static_assert(kMmaRows * kMmaCols * sizeof(T) <= 2 * kStep, "the tile of C goes through the same memory");
  __shared__ __align__(128) unsigned char shared[2 * kStep];
  for (int64_t block = blockIdx.x; block < cut.blocks; block += gridDim.x) {
    const ProductTile<T> tile(p, cut, block, kMmaRows, kMmaCols);
    MmaSums<T> sums;
    LoadsA a;
    LoadsB b;
    DepthStep<kMmaDepth> step;
    if (!step.is_past_end(p)) {
      a.load(step.of_a(tile));
      b.load(step.of_b(tile));
    }
    for (int half = 0; !step.is_past_end(p); half ^= 1) {
      unsigned char* const step_a = shared + half * kStep;
      unsigned char* const step_b = step_a + StepA::kBytes;
      const bool replaced = p.zero_hides && b.make_finite();
      a.store(step_a);
      b.store(step_b);
      const bool look_again = step_is_there(p.zero_hides, replaced);
      const DepthStep<kMmaDepth> next = step.next(p);
      if (!next.is_past_end(p)) {
        a.load(next.of_a(tile));
        b.load(next.of_b(tile));
      }
      sums.template add<StepA, StepB>(shared_address(step_a), shared_address(step_b));
      if (look_again) sums.add_visible(step.of_a(tile), step.of_b(tile));
      step = next;
    }
    __syncthreads();  // all have read the last step
    sums.write(p, tile, shared);
    __syncthreads();  // shared memory may be written again
  }
}

}  // namespace mha::cuda
