// Tiles of 16-bit matrices in shared memory: rows of queries, keys or values, one below the other, in chunks of 16
// bytes.
//
// ldmatrix reads eight rows of one chunk column at a time. For them to lie in eight different groups of banks, a
// chunk's column is exchanged with others by an exclusive or with bits of its row.
#pragma once
#include "../../core/problem.h"
#include "../../core/strides.h"
#include "../primitives.cuh"

namespace mha::cuda {

constexpr int kThreads = 128;          // of a block on tensor cores: four warps
constexpr int kChunk = 8;              // elements of 16 bytes
constexpr int64_t kLargestHead = 256;  // that the kernels on tensor cores take
// Bytes that a block can have on every architecture from 8.0 on.
constexpr int kSharedOfBlock = 99 * 1024;

// kHead: elements of a row, 32, 64, 96, 128 or 256.
template <int kHead>
struct TileLayout {
  static constexpr int kPitch = kHead * 2;  // bytes of a row
  // A pitch of whole 128 bytes puts all rows' chunk c into one group of banks: eight columns change places. Else rows
  // alternate between two halves of the banks, and four columns do.
  static constexpr bool kWhole = kPitch % 128 == 0;
  static constexpr int kColumns = kWhole ? 8 : 4;  // chunk columns that change places among themselves

  static __device__ __forceinline__ uint32_t exchange(int row) { return kWhole ? row & 7 : row >> 1 & 3; }
  static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
    return row * kPitch + ((chunk ^ exchange(row)) << 4);
  }
};

// A matrix as it lies in global memory, from the tile's first row on.
template <class T>
struct TileSource {
  const T* first;
  int64_t row_stride, col_stride;
  int64_t rows;  // that exist from `first` on; those behind count as zeros
  int cols;
};

// One thread's part of copying tiles of kRows rows; columns behind the head become zeros. Only for rows that lie in
// whole aligned chunks.
template <class T, int kRows, int kHead>
struct ChunkCopy {
  using Layout = TileLayout<kHead>;
  static constexpr int kColumns = Layout::kColumns;
  static constexpr int kColumnPasses = kHead / kChunk / kColumns;
  static constexpr int kRowStep = kThreads / kColumns;  // a multiple of what exchange() looks at
  static constexpr int kRowPasses = kRows / kRowStep;
  static_assert(kRows % kRowStep == 0);

  // kGuarded: rows may be missing.
  template <bool kGuarded>
  static __device__ __forceinline__ void run(uint32_t tile, const TileSource<T>& from) {
    const int row = threadIdx.x / kColumns, column = threadIdx.x % kColumns;
    const uint32_t to = tile + Layout::offset(row, column);
    const T* source = from.first + row * from.row_stride + column * kChunk;
#pragma unroll
    for (int i = 0; i < kRowPasses; ++i) {
#pragma unroll
      for (int c = 0; c < kColumnPasses; ++c) {
        bool there = (column + c * kColumns) * kChunk < from.cols;
        if (kGuarded) there = there && row + i * kRowStep < from.rows;
        copy_async_or_zero(to + i * kRowStep * Layout::kPitch + c * kColumns * 16, source + c * kColumns * kChunk,
                           there);
      }
      source += kRowStep * from.row_stride;
    }
  }
};

// The same element by element, for any strides; done when it returns, up to a barrier.
template <class T, int kRows, int kHead>
MHA_DEVICE void copy_elements(uint32_t tile, const TileSource<T>& from) {
  constexpr int kPairs = kHead / 2;
#pragma unroll 1
  for (int i = threadIdx.x; i < kRows * kPairs; i += kThreads) {
    const int row = i / kPairs, col = i % kPairs * 2;
    const T* source = from.first + row * from.row_stride + col * from.col_stride;
    const bool there = row < from.rows;
    const uint32_t low = there && col < from.cols ? source[0].bits : 0;
    const uint32_t high = there && col + 1 < from.cols ? source[from.col_stride].bits : 0;
    store_shared(tile + TileLayout<kHead>::offset(row, col / kChunk) + col % kChunk * 2, low | high << 16);
  }
}

// Whether the rows of every entry of a stack lie in whole aligned chunks.
inline bool lies_in_chunks(const BatchShape& batch, const void* data, const int64_t* batch_stride, int64_t row_stride,
                           int64_t col_stride, int64_t cols) {
  bool whole = reinterpret_cast<uintptr_t>(data) % 16 == 0 && row_stride % kChunk == 0 && cols % kChunk == 0 &&
               (col_stride == 1 || cols == 0);
  for (int d = 0; d < batch.ndim; ++d) whole = whole && (batch_stride[d] % kChunk == 0 || batch.size[d] == 1);
  return whole;
}

template <class Pointer>
inline bool lies_in_chunks(const BatchShape& batch, const Strided<Pointer>& stack, int64_t cols) {
  return lies_in_chunks(batch, stack.data, stack.batch_stride, stack.row_stride, stack.col_stride, cols);
}

// Fragments (primitives.cuh) of a tile. Each lane keeps the address of chunk 0 or 1 of its row, column exchanged; other
// chunks differ in bits that nothing is added to, since tiles are aligned to 128 bytes.
template <int kHead>
struct TileFragments {
  using Layout = TileLayout<kHead>;
  uint32_t first;

  static __device__ __forceinline__ TileFragments of(uint32_t tile, int row, int chunk) {
    return {tile + Layout::offset(row, chunk)};
  }
  // A: 16 rows of queries, depth along the head. Also B where the head is along the columns: 16 keys, transposed.
  static __device__ __forceinline__ TileFragments rows_first(uint32_t tile, int first_row) {
    const int lane = threadIdx.x % 32;
    return of(tile, first_row + lane % 16, lane / 16);
  }
  // B: two groups of 8 keys, depth along the head.
  static __device__ __forceinline__ TileFragments depth_first(uint32_t tile) {
    const int lane = threadIdx.x % 32;
    return of(tile, lane % 8 + lane / 16 * 8, lane / 8 % 2);
  }

  // Address of the lane's part of chunks 2 * pair and 2 * pair + 1, rows 16 * group on.
  __device__ __forceinline__ uint32_t at(int group, int pair) const {
    const int chunk = 2 * pair % Layout::kColumns, columns = 2 * pair - chunk;
    return (first ^ chunk << 4) + group * 16 * Layout::kPitch + columns * 16;
  }
};

}  // namespace mha::cuda
