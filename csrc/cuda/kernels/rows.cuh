// What the row kernels share: how rows are handed out to blocks and teams of threads, and how a team reads, writes and
// sums up the keys of its row.
#pragma once
#include "../../core/integers.h"
#include "../../core/masking.h"
#include "elements.cuh"

namespace mha::cuda {

constexpr int kWarp = 32;
constexpr int kRowThreads = 256;  // of a block: 8 warps, which 2048 threads of a multiprocessor hold eight times

// How the rows of all entries are cut into blocks. Follows from the shape alone.
struct RowCut {
  int team;  // threads per row: a warp, or the whole block
  int64_t rows, rows_per_block, blocks_per_entry, blocks;

  static RowCut of(const BatchShape& batch, int64_t rows, int64_t cols) {
    // Up to here a warp takes a row in four steps or fewer; with more keys, and few rows, warps would be too few.
    constexpr int64_t kWarpRow = 1024;
    // Rows of a team, one after the other: they share the work of finding the matrices of their entry. Only with so
    // many rows that the blocks are enough anyway: 8 for each of some 130 multiprocessors.
    constexpr int64_t kRowsOfTeam = 4, kManyRows = 32768;
    RowCut cut;
    cut.team = cols <= kWarpRow ? kWarp : kRowThreads;
    cut.rows = rows;
    cut.rows_per_block = kRowThreads / cut.team * (batch.count() * rows >= kManyRows ? kRowsOfTeam : 1);
    cut.blocks_per_entry = ceil_div(rows, cut.rows_per_block);
    cut.blocks = batch.count() * cut.blocks_per_entry;
    return cut;
  }

  // Calls rows(entry) once for each block at hand, and what that returns for each row of this thread's team.
  template <class Rows>
  __device__ __forceinline__ void for_each_row(Rows&& rows_of) const {
    for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
      const int64_t entry = block / blocks_per_entry, first = (block - entry * blocks_per_entry) * rows_per_block;
      const int64_t end = min_of(first + rows_per_block, rows);
      const auto row = rows_of(entry);
      for (int64_t i = first + threadIdx.x / team; i < end; i += kRowThreads / team) row(i);
    }
  }
};

// The threads of one row. A reduction needs all of them, and gives all of them the same bits.
struct Team {
  int rank, size;

  __device__ explicit Team(const RowCut& cut) : rank(threadIdx.x % cut.team), size(cut.team) {}

  template <class Acc, class Combine>
  __device__ __forceinline__ Acc reduce(Acc x, Combine combine) const {
    for (int distance = kWarp / 2; distance > 0; distance /= 2) x = combine(x, __shfl_xor_sync(~0u, x, distance));
    if (size == kWarp) return x;
    __shared__ Acc of_warp[kRowThreads / kWarp];
    if (rank % kWarp == 0) of_warp[rank / kWarp] = x;
    __syncthreads();
    x = of_warp[0];
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

// Keys that a thread takes at once, up to N of them: first, first + step, ...
template <int N>
struct Keys {
  int64_t first;
  int step;
  uint32_t present;  // bit i: key(i) is a key of the row, and not past its end

  __device__ __forceinline__ Keys(int64_t first_key, int key_step, int64_t end)
      : first(first_key), step(key_step), present(0) {
#pragma unroll
    for (int i = 0; i < N; ++i) present |= uint32_t{key(i) < end} << i;
  }
  __device__ __forceinline__ int64_t key(int i) const { return first + i * step; }
  __device__ __forceinline__ bool has(int i) const { return present >> i & 1; }
  __device__ __forceinline__ bool are_run() const { return step == 1 && present == (1u << N) - 1; }
};

// Shares the keys [0, cols) of a row out over its team, a run's number to each thread in turn, and calls
// step(keys, slot). Neighbouring keys for a thread (`as_runs`), or for neighbouring threads. Either way slot,
// slot + size, ... are numbers that belong to these keys alone.
template <class T, class Step>
__device__ __forceinline__ void for_keys(const Team& team, int64_t cols, bool as_runs, Step&& step) {
  constexpr int N = kRun<T>;
  const int all = N * team.size, ahead = as_runs ? N * team.rank : team.rank;
  for (int64_t begin = 0; begin < cols; begin += all)
    step(Keys<N>(begin + ahead, as_runs ? 1 : team.size, cols), begin + team.rank);
}

// p[j * stride], widened. Stride 0 is a value broadcast along the row; null p: an absent row.
template <class T>
struct RowReader {
  using Acc = accumulate_t<T>;
  const T* p;
  int64_t stride;

  __device__ RowReader(const T* matrix, const Input& view, int64_t i)
      : p(matrix ? matrix + i * view.row_stride : nullptr), stride(view.col_stride) {}

  __device__ explicit operator bool() const { return p != nullptr; }
  __device__ __forceinline__ bool has_runs() const { return stride == 1 && starts_run(p); }

  __device__ __forceinline__ void read(const Keys<kRun<T>>& keys, Acc (&x)[kRun<T>]) const {
    T from[kRun<T>] = {};
    if (keys.are_run() && has_runs()) {
      load_run(p + keys.first, from);
    } else {
      const T* at = p + keys.first * stride;
#pragma unroll
      for (int i = 0; i < kRun<T>; ++i, at += keys.step * stride)
        if (keys.has(i)) from[i] = *at;
    }
#pragma unroll
    for (int i = 0; i < kRun<T>; ++i) x[i] = to_accumulate(from[i]);
  }
};

template <class T>
struct RowWriter {
  using Acc = accumulate_t<T>;
  T* p;
  int64_t stride;

  __device__ RowWriter(T* matrix, const Output& view, int64_t i)
      : p(matrix ? matrix + i * view.row_stride : nullptr), stride(view.col_stride) {}

  __device__ explicit operator bool() const { return p != nullptr; }
  __device__ __forceinline__ bool has_runs() const { return stride == 1 && starts_run(p); }

  __device__ __forceinline__ void write(const Keys<kRun<T>>& keys, const Acc (&x)[kRun<T>]) const {
    T to[kRun<T>];
#pragma unroll
    for (int i = 0; i < kRun<T>; ++i) to[i] = from_accumulate<T>(x[i]);
    if (keys.are_run() && has_runs()) return store_run(p + keys.first, to);
    T* at = p + keys.first * stride;
#pragma unroll
    for (int i = 0; i < kRun<T>; ++i, at += keys.step * stride)
      if (keys.has(i)) *at = to[i];
  }
};

// No mask, no window: every key of every row is visible.
__device__ __forceinline__ BatchVisibility all_visible(int64_t keys) {
  return {0, keys, INT64_MAX, INT64_MAX, nullptr, 0, 0};
}

// Which keys row i may see, as bits.
struct RowVisibility {
  KeyRange range;
  const uint8_t* mask;  // any byte that is not 0 is true; null: none
  int64_t mask_stride;

  __device__ RowVisibility(const BatchVisibility& v, int64_t i)
      : range(visible_keys(v, i)),
        mask(v.mask ? reinterpret_cast<const uint8_t*>(v.mask) + i * v.mask_row_stride : nullptr),
        mask_stride(v.mask_col_stride) {}

  // Bit i: keys.key(i) is a key, and visible.
  template <int N>
  __device__ __forceinline__ uint32_t bits(const Keys<N>& keys) const {
    uint32_t visible = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int64_t j = keys.key(i);
      const bool inside = j >= range.begin && j < range.end;
      visible |= uint32_t{inside && (!mask || mask[j * mask_stride] != 0)} << i;
    }
    return visible;
  }
};

// The matrix of one batch entry; null where there is none.
template <class T>
__device__ __forceinline__ const T* matrix_or_null(const BatchShape& batch, int64_t entry, const Input& stack) {
  return stack ? matrix<const T>(batch, entry, stack) : nullptr;
}
template <class T>
__device__ __forceinline__ T* matrix_or_null(const BatchShape& batch, int64_t entry, const Output& stack) {
  return stack ? matrix<T>(batch, entry, stack) : nullptr;
}

}  // namespace mha::cuda
