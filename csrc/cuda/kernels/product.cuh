// C = alpha * sum_g A_g B_g over a batch of strided matrices: what the kernels for float and double (product_fma.cuh)
// and for the 16-bit types (product_mma.cuh) share.
//
// A block of threads computes a tile of one C. It goes along the depth step by step, group after group: while a step of
// A and B in shared memory is multiplied, the next one is on its way from memory into registers.
//
// "Zero hides": a term whose factor of A is zero counts as zero, whatever B holds. Where the problem asks for it, NaN
// and infinities of B are replaced by zeros on their way to shared memory, so that hidden ones leave no trace: every
// bit is that of a finite B. A step that had some is gone through once more for those that are visible.
#pragma once
#include "../../core/finite.h"
#include "../../core/integers.h"
#include "elements.cuh"

namespace mha::cuda {

// The tiles of all C, columns first: blocks at work at the same time share rows of A.
struct ProductCut {
  int64_t row_tiles, col_tiles, blocks;

  static ProductCut of(const Product& p, int tile_rows, int tile_cols) {
    ProductCut cut;
    cut.row_tiles = ceil_div(p.m, tile_rows);
    cut.col_tiles = ceil_div(p.n, tile_cols);
    cut.blocks = p.batch.count() * cut.row_tiles * cut.col_tiles;
    return cut;
  }
};

// The tile of C that block number `block` computes.
template <class T>
struct ProductTile {
  const Product& p;
  int rows, cols;
  const T* a;  // the first row's and the first column's factors, of the first group
  const T* b;
  T* c;

  __device__ ProductTile(const Product& problem, const ProductCut& cut, int64_t block, int tile_rows, int tile_cols)
      : p(problem) {
    const int64_t in_entry = cut.row_tiles * cut.col_tiles, entry = block / in_entry, tile = block - entry * in_entry;
    const int64_t row_tile = tile / cut.col_tiles;
    const int64_t row = row_tile * tile_rows, col = (tile - row_tile * cut.col_tiles) * tile_cols;
    rows = static_cast<int>(min_of(p.m - row, tile_rows));
    cols = static_cast<int>(min_of(p.n - col, tile_cols));
    a = matrix_of<const T>(p.batch, entry, p.a) + row * p.a.row_stride;
    b = matrix_of<const T>(p.batch, entry, p.b) + col * p.b.col_stride;
    c = matrix_of<T>(p.batch, entry, p.c) + row * p.c.row_stride + col * p.c.col_stride;
  }
};

// A step of a tile: up to kDepth of the depth of one group. All of the first group come first, then those of the next.
template <int kDepth>
struct DepthStep {
  int64_t k = 0, group = 0;

  __device__ __forceinline__ bool is_past_end(const Product& p) const { return p.k == 0 || group >= p.groups; }
  __device__ __forceinline__ DepthStep next(const Product& p) const {
    return k + kDepth < p.k ? DepthStep{k + kDepth, group} : DepthStep{0, group + 1};
  }
  __device__ __forceinline__ int depth(const Product& p) const { return static_cast<int>(min_of(p.k - k, kDepth)); }

  // Row `row` of A, column `col` of B, at the depth where the step begins.
  template <class T>
  __device__ __forceinline__ const T* a(const ProductTile<T>& tile, int row) const {
    const Product& p = tile.p;
    return tile.a + group * p.a_group_stride + row * p.a.row_stride + k * p.a.col_stride;
  }
  template <class T>
  __device__ __forceinline__ const T* b(const ProductTile<T>& tile, int col) const {
    const Product& p = tile.p;
    return tile.b + group * p.b_group_stride + col * p.b.col_stride + k * p.b.row_stride;
  }
};

// A factor as its rows (of A) or columns (of B) and their depth.
template <class T>
struct Factor {
  const T* p;  // the tile's first
  int64_t stride, depth_stride, group_stride;
  int count;

  __device__ static __forceinline__ Factor a_of(const ProductTile<T>& tile) {
    const Product& p = tile.p;
    return {tile.a, p.a.row_stride, p.a.col_stride, p.a_group_stride, tile.rows};
  }
  __device__ static __forceinline__ Factor b_of(const ProductTile<T>& tile) {
    const Product& p = tile.p;
    return {tile.b, p.b.col_stride, p.b.row_stride, p.b_group_stride, tile.cols};
  }

  // From the elements of `step` to those of `next`.
  template <int kDepth>
  __device__ __forceinline__ int64_t distance(const DepthStep<kDepth>& step, const DepthStep<kDepth>& next) const {
    return next.k ? kDepth * depth_stride : group_stride - step.k * depth_stride;
  }
};

// The barrier after a step was written to shared memory. Returns whether any thread replaced something of it.
__device__ __forceinline__ bool step_is_there(bool zero_hides, bool replaced) {
  if (zero_hides) return __syncthreads_or(replaced);
  __syncthreads();
  return false;
}

}  // namespace mha::cuda
