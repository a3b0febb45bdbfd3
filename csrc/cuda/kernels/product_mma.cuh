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
  static constexpr bool kDepthInRow = kAlongDepth;
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
};

// Reads fragments of 16 x 16 elements, the depth in a register, as four matrices of 8 x 8. kDepthFirst: the second one
// is 8 deeper than the first, else 8 further along o; the third and fourth follow in the other direction. A warp reads
// two fragments side by side and two one behind the other; two places of a lane are enough to find all four, as the
// permutation repeats after 8 rows.
template <class Step, bool kDepthFirst>
struct MmaReader {
  int place[2];  // along the depth: of both depths; else: of both fragments side by side

  __device__ __forceinline__ explicit MmaReader(int o) {
    const int lane = threadIdx.x % 32, second = lane >> 3 & 1, third = lane >> 4;
    const int further = kDepthFirst ? third : second, deeper = kDepthFirst ? second : third;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      place[i] = calculated_once(Step::kDepthInRow ? Step::offset(o + (lane & 7) + 8 * further, 16 * i + 8 * deeper)
                                                   : Step::offset(o + 16 * i + 8 * further, (lane & 7) + 8 * deeper));
  }

  // The fragment number `side` along o, `depth` along the depth.
  __device__ __forceinline__ void read(uint32_t step, int side, int depth, uint32_t (&r)[4]) const {
    constexpr int k16Rows = 16 * Step::kRowRuns * kMmaRunBytes;
    if (Step::kDepthInRow) load_matrices(r, step + place[depth] + side * k16Rows);
    else load_matrices_transposed(r, step + place[side] + depth * k16Rows);
  }
};

// n elements from p on, p[stride] apart, zeros after them.
template <class T>
__device__ __forceinline__ uint4 load_elements(const T* p, int64_t stride, int n) {
  T x[kMmaRun];
#pragma unroll
  for (int i = 0; i < kMmaRun; ++i, p += stride) x[i] = i < n ? *p : T{0};
  uint4 run;
  memcpy(&run, x, sizeof run);
  return run;
}

// The exponent of a 16-bit type, all ones in NaN and infinities, and its lowest bit.
template <class T>
constexpr uint32_t kExponent = std::is_same_v<T, bfloat16> ? 0x7F80u : 0x7C00u;
template <class T>
constexpr uint32_t kExponentUnit = std::is_same_v<T, bfloat16> ? 0x0080u : 0x0400u;

__device__ __forceinline__ bool is_finite(bfloat16 x) { return (~x.bits & kExponent<bfloat16>) != 0; }
__device__ __forceinline__ bool is_finite(float16 x) { return (~x.bits & kExponent<float16>) != 0; }

// The sign bits of those of two elements that are not finite: one more than a full exponent carries there.
template <class T>
__device__ __forceinline__ uint32_t not_finite(uint32_t pair) {
  return ((pair & kExponent<T> * 0x10001u) + kExponentUnit<T> * 0x10001u) & 0x80008000u;
}

// Runs of a step on the way from memory to shared memory; those of a thread are whole rows of the step apart.
template <class T, int kCount, bool kAlongDepth>
struct MmaLoads {
  using Step = MmaStep<kCount, kAlongDepth>;
  static constexpr int kLoads = Step::kRuns / kMmaThreads, kRowsBetween = kMmaThreads / Step::kRowRuns;
  static_assert(kRowsBetween % 8 == 0, "the permutation repeats after 8 rows");
  const int row, column;  // the thread's first run, in the step
  const int place;        // of it in shared memory
  const int count;
  const int64_t stride, gap;  // between elements, between runs
  const T* p;                 // the thread's first element
  const bool as_runs;         // the elements of a run are neighbours, and aligned, in every step
  uint4 x[kLoads];

  __device__ __forceinline__ explicit MmaLoads(const Factor<T>& f)
      : row(threadIdx.x / Step::kRowRuns),
        column(threadIdx.x % Step::kRowRuns * kMmaRun),
        place(calculated_once(Step::run_offset(row, column / kMmaRun))),
        count(f.count),
        stride(kAlongDepth ? f.depth_stride : f.stride),
        gap(kRowsBetween * (kAlongDepth ? f.stride : f.depth_stride)),
        p(f.p + row * (kAlongDepth ? f.stride : f.depth_stride) + column * stride),
        as_runs(stride == 1 && starts_run<kMmaRun>(p) && (gap | f.group_stride) % kMmaRun == 0) {}

  __device__ __forceinline__ void load(int depth) {
    const int rows = kAlongDepth ? count : depth, columns = kAlongDepth ? depth : count;
    const T* at = p;
#pragma unroll
    for (int i = 0; i < kLoads; ++i, at += gap) {
      const int n = row + i * kRowsBetween < rows ? columns - column : 0;
      x[i] = n >= kMmaRun && as_runs ? *reinterpret_cast<const uint4*>(at) : load_elements(at, stride, n);
    }
  }

  // Zeros for NaN and infinities. Returns whether there were any.
  __device__ __forceinline__ bool make_finite() {
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      for (uint32_t* pair : {&x[i].x, &x[i].y, &x[i].z, &x[i].w}) {
        const uint32_t signs = not_finite<T>(*pair);
        *pair &= ~((signs >> 15) * 0xFFFFu);  // all bits of those elements
        found |= signs;
      }
    return found != 0;
  }

  __device__ __forceinline__ void store(unsigned char* step) const {
    uint4* at = reinterpret_cast<uint4*>(step + place);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) at[i * kMmaThreads] = x[i];
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

  template <class ReaderA, class ReaderB>
  __device__ __forceinline__ void add(const ReaderA& reader_a, uint32_t a, const ReaderB& reader_b, uint32_t b) {
#pragma unroll
    for (int depth = 0; depth < kMmaDepth / 16; ++depth) {
      uint32_t left[kTilesDown][4];
#pragma unroll
      for (int down = 0; down < kTilesDown; ++down) reader_a.read(a, down, depth, left[down]);
#pragma unroll
      for (int side = 0; side < kTilesAcross / 2; ++side) {
        uint32_t right[4];
        reader_b.read(b, side, depth, right);
#pragma unroll
        for (int down = 0; down < kTilesDown; ++down) {
          mma<T>(sum[down][2 * side], left[down], right[0], right[1]);
          mma<T>(sum[down][2 * side + 1], left[down], right[2], right[3]);
        }
      }
    }
  }

  // Terms whose factor of B was replaced, as far as they are visible.
  __device__ __forceinline__ void add_visible(const ProductTile<T>& tile, const DepthStep<kMmaDepth>& step) {
    const int depth = step.depth(tile.p);
#pragma unroll
    for (int across = 0; across < kTilesAcross; ++across)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (col(across) + e >= tile.cols) continue;
        const T* b = step.b(tile, col(across) + e);
#pragma unroll 1
        for (int k = 0; k < depth; ++k, b += tile.p.b.row_stride) {
          const T right = *b;
          if (is_finite(right)) continue;
#pragma unroll
          for (int down = 0; down < kTilesDown; ++down)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              if (row(down, half) >= tile.rows) continue;
              const float left = to_accumulate(step.a(tile, row(down, half))[k * tile.p.a.col_stride]);
              if (left != 0) sum[down][across][2 * half + e] += left * to_accumulate(right);
            }
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
  const MmaReader<StepA, false> reader_a(MmaSums<T>::warp_row());
  const MmaReader<StepB, true> reader_b(MmaSums<T>::warp_col());
  for (int64_t block = blockIdx.x; block < cut.blocks; block += gridDim.x) {
    const ProductTile<T> tile(p, cut, block, kMmaRows, kMmaCols);
    const auto factor_a = Factor<T>::a_of(tile), factor_b = Factor<T>::b_of(tile);
    MmaSums<T> sums;
    LoadsA a(factor_a);
    LoadsB b(factor_b);
    DepthStep<kMmaDepth> step;
    if (!step.is_past_end(p)) {
      a.load(step.depth(p));
      b.load(step.depth(p));
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
        a.p += factor_a.distance(step, next);
        b.p += factor_b.distance(step, next);
        a.load(next.depth(p));
        b.load(next.depth(p));
      }
      sums.add(reader_a, shared_address(step_a), reader_b, shared_address(step_b));
      if (look_again) sums.add_visible(tile, step);
      step = next;
    }
    __syncthreads();  // all have read the last step
    sums.write(p, tile, shared);
    __syncthreads();  // shared memory may be written again
  }
}

}  // namespace mha::cuda
