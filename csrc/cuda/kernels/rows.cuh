// What the row kernels share: how rows are handed out to teams of threads, and how a team reads, writes and sums up
// the keys of its row.
#pragma once
#include "../../core/integers.h"
#include "../../core/masking.h"
#include "elements.cuh"

namespace mha::cuda {

constexpr int kWarp = 32;
// 4 warps a block, and 5 blocks on a multiprocessor: 96 registers a thread, with fewer they spill.
constexpr int kRowThreads = 128, kRowBlocks = 5;

// Keys that a thread takes at once, 16 bytes of them.
template <class T>
constexpr int kRowRun = 16 / sizeof(T);

// How the rows of all entries are shared out. Follows from the shape alone.
struct RowCut {
  int team;  // threads per row: a warp, or the whole block
  int64_t rows_of_entry, rows, blocks;

  static RowCut of(DType dtype, const BatchShape& batch, int64_t rows, int64_t cols) {
    // Up to here a warp takes a row: as long as four rows in the accumulation type fit shared memory, 32 KB. A longer
    // row is worth the work of finding it that each warp does; so is a shorter one where rows are too few for 20 warps
    // on each of some 130 multiprocessors, unless a warp takes it in a step or two.
    constexpr int64_t kManyRows = 2600, kFewKeys = 256;
    const int64_t fits = dtype == DType::f64 ? 1024 : 2048;
    RowCut cut;
    cut.team = cols <= (batch.count() * rows < kManyRows ? kFewKeys : fits) ? kWarp : kRowThreads;
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
      const int64_t entry = index / rows_of_entry;
      if (index < rows) row(entry, index - entry * rows_of_entry);
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
      : first(first_key), log2_step(log2_key_step), present(are_below(end) ? kAll : below(end)) {}

  __device__ __forceinline__ bool are_below(int64_t limit) const { return first + ((N - 1) << log2_step) < limit; }
  // Bit i: key number i is below `limit`.
  __device__ __forceinline__ uint32_t below(int64_t limit) const {
    const int distance = static_cast<int>(max_of(0, min_of(limit - first, int64_t{N} << log2_step)));
    return (1u << ((distance + (1 << log2_step) - 1) >> log2_step)) - 1;
  }
  __device__ __forceinline__ bool are_run() const { return log2_step == 0 && present == kAll; }
};

// Shares the keys [0, cols) of a row out over its team, a run's number to each thread in turn, and calls
// step(keys, begin), where the team is at the keys from `begin` on (modulo 2^32). Neighbouring keys for a thread
// (`as_runs`), or for neighbouring threads.
template <class T, class Step>
__device__ __forceinline__ void for_keys(const Team& team, int64_t cols, bool as_runs, Step&& step) {
  constexpr int N = kRowRun<T>;
  const int ahead = as_runs ? N * team.rank : team.rank, log2_step = as_runs ? 0 : __ffs(team.size) - 1;
#pragma unroll 1
  for (int64_t first = ahead; first < cols; first += N * team.size)
    step(Keys<N>(first, log2_step, cols), static_cast<int>(first) - ahead);
}

// Row i of a matrix; null where there is none.
template <class T, class Pointer>
__device__ __forceinline__ T* row_of(const BatchShape& batch, int64_t entry, const Strided<Pointer>& stack, int64_t i) {
  return stack ? matrix_of<T>(batch, entry, stack) + i * stack.row_stride : nullptr;
}

// p[j * stride] for the keys j of one row, widened. Stride 0 is a value broadcast along the row; null p: an absent row.
template <class T>
struct RowReader {
  using Acc = accumulate_t<T>;
  const T* p;
  int64_t stride;

  __device__ __forceinline__ RowReader(const BatchShape& batch, int64_t entry, const Input& stack, int64_t i)
      : p(row_of<const T>(batch, entry, stack, i)), stride(stack.col_stride) {}

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
      : p(row_of<T>(batch, entry, stack, i)), stride(stack.col_stride) {}

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
  const uint8_t* mask;
  int64_t mask_stride;

  __device__ __forceinline__ explicit RowVisibility(int64_t keys) : range{0, keys}, mask(nullptr), mask_stride(0) {}
  __device__ __forceinline__ RowVisibility(const BatchVisibility& v, int64_t i)
      : range(visible_keys(v, i)),
        mask(v.mask ? v.mask + i * v.mask_row_stride : nullptr),
        mask_stride(v.mask_col_stride) {}

  // Bit i: key number i is there, and visible.
  template <int N>
  __device__ __forceinline__ uint32_t bits(const Keys<N>& keys) const {
    const bool all = keys.first >= range.begin && keys.are_below(range.end);
    uint32_t visible = all ? Keys<N>::kAll : keys.below(range.end) & ~keys.below(range.begin);
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
