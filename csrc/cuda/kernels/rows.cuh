// What the row kernels share: how rows are handed out to teams of threads, and how a team reads, writes and sums up
// the keys of its row.
#pragma once
#include "../../core/integers.h"
#include "../../core/masking.h"
#include "elements.cuh"

namespace mha::cuda {

constexpr int kWarp = 32;
// 8 warps a block, and 3 blocks on a multiprocessor: 80 registers a thread. More would spill registers.
constexpr int kRowThreads = 256, kRowBlocks = 3;

// Keys that a thread takes at once. 4: eight of a 16-bit type would fill a memory instruction, but spill registers.
template <class T>
constexpr int kRowRun = sizeof(T) == 8 ? 2 : 4;

// How the rows of all entries are shared out. Follows from the shape alone.
struct RowCut {
  int team;  // threads per row: a warp, or the whole block
  int64_t rows_of_entry, rows, blocks;

  static RowCut of(const BatchShape& batch, int64_t rows, int64_t cols) {
    // Up to here a warp takes a row in a few steps; of rows with more keys there may be few.
    constexpr int64_t kWarpRow = 1024;
    RowCut cut;
    cut.team = cols <= kWarpRow ? kWarp : kRowThreads;
    cut.rows_of_entry = rows;
    cut.rows = batch.count() * rows;
    cut.blocks = ceil_div(cut.rows, kRowThreads / cut.team);
    return cut;
  }

  // Calls row(entry, i) for each row of this thread's team.
  template <class Row>
  __device__ __forceinline__ void for_each_row(Row&& row) const {
    const int teams = kRowThreads / team;
    for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
      const int64_t index = block * teams + threadIdx.x / team;
      if (index < rows) row(index / rows_of_entry, index % rows_of_entry);
    }
  }
};

// The threads of one row. A reduction needs all of them, and gives all of them the same bits.
struct Team {
  int rank, size;

  __device__ explicit Team(const RowCut& cut) : rank(threadIdx.x % cut.team), size(cut.team) {}

  template <class Acc, class Combine>
  __device__ __forceinline__ Acc reduce(Acc x, Combine combine) const {
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) x = combine(x, __shfl_xor_sync(~0u, x, distance));
    if (size == kWarp) return x;
    __shared__ Acc of_warp[kRowThreads / kWarp];
    if (rank % kWarp == 0) of_warp[rank / kWarp] = x;
    __syncthreads();
    x = of_warp[0];
#pragma unroll
    for (int w = 1; w < kRowThreads / kWarp; ++w) x = combine(x, of_warp[w]);
    __syncthreads();  // of_warp may be written again
    return x;
  }
  template <class Acc>
  __device__ __forceinline__ Acc sum(Acc x) const {
    return reduce(x, [](Acc a, Acc b) { return a + b; });
  }
  template <class Acc>
  __device__ __forceinline__ Acc max(Acc x) const {
    return reduce(x, [](Acc a, Acc b) { return larger(a, b); });
  }
};

// Keys that a thread takes at once, up to N of them: first, first + step, ... where the step is a power of two.
template <int N>
struct Keys {
  static constexpr uint32_t kAll = (1u << N) - 1;
  int64_t first;
  int log2_step;
  uint32_t present;  // bit i: key number i is not past the end of the row

  __device__ __forceinline__ Keys(int64_t first_key, int log2_key_step, int64_t end)
      : first(first_key), log2_step(log2_key_step), present(below(end)) {}

  // Bit i: key number i is below `limit`.
  __device__ __forceinline__ uint32_t below(int64_t limit) const {
    const int distance = static_cast<int>(max_of(0, min_of(limit - first, int64_t{N} << log2_step)));
    return (1u << ((distance + (1 << log2_step) - 1) >> log2_step)) - 1;
  }
  __device__ __forceinline__ bool are_run() const { return log2_step == 0 && present == kAll; }
};

// Shares the keys [0, cols) of a row out over its team, a run's number to each thread in turn, and calls
// step(keys, slot). Neighbouring keys for a thread (`as_runs`), or for neighbouring threads. Either way slot,
// slot + size, ... are numbers that belong to these keys alone.
template <class T, class Step>
__device__ __forceinline__ void for_keys(const Team& team, int64_t cols, bool as_runs, Step&& step) {
  constexpr int N = kRowRun<T>;
  const int all = N * team.size, ahead = as_runs ? N * team.rank : team.rank;
  const int log2_step = as_runs ? 0 : __ffs(team.size) - 1;
#pragma unroll 1
  for (int64_t begin = 0; begin < cols; begin += all) step(Keys<N>(begin + ahead, log2_step, cols), begin + team.rank);
}

// p[j * stride] for the keys j of one row, widened. Stride 0 is a value broadcast along the row; null p: an absent row.
template <class T>
struct RowReader {
  using Acc = accumulate_t<T>;
  const T* p;
  int64_t stride;

  __device__ __forceinline__ RowReader(const BatchShape& batch, int64_t entry, const Input& stack, int64_t i)
      : p(stack ? matrix<const T>(batch, entry, stack) + i * stack.row_stride : nullptr), stride(stack.col_stride) {}

  __device__ __forceinline__ explicit operator bool() const { return p != nullptr; }
  __device__ __forceinline__ bool has_runs() const { return stride == 1 && starts_run<kRowRun<T>>(p); }

  __device__ __forceinline__ void read(const Keys<kRowRun<T>>& keys, Acc (&x)[kRowRun<T>]) const {
    T from[kRowRun<T>] = {};
    if (keys.are_run() && has_runs()) {
      load_run(p + keys.first, from);
    } else {
      const T* at = p + keys.first * stride;
#pragma unroll
      for (int i = 0; i < kRowRun<T>; ++i, at += stride << keys.log2_step)
        if (keys.present >> i & 1) from[i] = *at;
    }
#pragma unroll
    for (int i = 0; i < kRowRun<T>; ++i) x[i] = to_accumulate(from[i]);
  }
};

template <class T>
struct RowWriter {
  using Acc = accumulate_t<T>;
  T* p;
  int64_t stride;

  __device__ __forceinline__ RowWriter(const BatchShape& batch, int64_t entry, const Output& stack, int64_t i)
      : p(stack ? matrix<T>(batch, entry, stack) + i * stack.row_stride : nullptr), stride(stack.col_stride) {}

  __device__ __forceinline__ explicit operator bool() const { return p != nullptr; }
  __device__ __forceinline__ bool has_runs() const { return stride == 1 && starts_run<kRowRun<T>>(p); }

  __device__ __forceinline__ void write(const Keys<kRowRun<T>>& keys, const Acc (&x)[kRowRun<T>]) const {
    T to[kRowRun<T>];
#pragma unroll
    for (int i = 0; i < kRowRun<T>; ++i) to[i] = from_accumulate<T>(x[i]);
    if (keys.are_run() && has_runs()) return store_run(p + keys.first, to);
    T* at = p + keys.first * stride;
#pragma unroll
    for (int i = 0; i < kRowRun<T>; ++i, at += stride << keys.log2_step)
      if (keys.present >> i & 1) *at = to[i];
  }
};

// Which keys row i may see, as bits.
struct RowVisibility {
  KeyRange range;
  const uint8_t* mask;  // any byte that is not 0 is true; null: none
  int64_t mask_stride;

  __device__ __forceinline__ explicit RowVisibility(int64_t keys) : range{0, keys}, mask(nullptr), mask_stride(0) {}
  __device__ __forceinline__ RowVisibility(const BatchVisibility& v, int64_t i)
      : range(visible_keys(v, i)),
        mask(v.mask ? reinterpret_cast<const uint8_t*>(v.mask) + i * v.mask_row_stride : nullptr),
        mask_stride(v.mask_col_stride) {}

  // Bit i: key number i is there, and visible.
  template <int N>
  __device__ __forceinline__ uint32_t bits(const Keys<N>& keys) const {
    uint32_t visible = keys.below(range.end) & ~keys.below(range.begin);
    if (mask && visible) {
      const uint8_t* at = mask + keys.first * mask_stride;
#pragma unroll
      for (int i = 0; i < N; ++i, at += mask_stride << keys.log2_step)
        if ((visible >> i & 1) && *at == 0) visible &= ~(1u << i);
    }
    return visible;
  }
};

}  // namespace mha::cuda
