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
#include "../../core/strides.h"
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

// The part of A or B that a tile needs: element (o, k) at p[o * stride + k * depth_stride], where k is the depth and o
// counts rows of A or columns of B.
template <class T>
struct Factor {
  const T* p;
  int64_t stride, depth_stride;
  int count, depth;  // o and k end here, at most as far as a tile goes

  __device__ __forceinline__ const T* at(int64_t o, int64_t k) const { return p + o * stride + k * depth_stride; }
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
    a = matrix<const T>(p.batch, entry, p.a) + row * p.a.row_stride;
    b = matrix<const T>(p.batch, entry, p.b) + col * p.b.col_stride;
    c = matrix<T>(p.batch, entry, p.c) + row * p.c.row_stride + col * p.c.col_stride;
  }
};

// A step of a tile: some depth of one group. All depths of the first group come first, then those of the next.
template <int kDepth>
struct DepthStep {
  int64_t k = 0, group = 0;

  __device__ __forceinline__ bool is_past_end(const Product& p) const { return p.k == 0 || group >= p.groups; }
  __device__ __forceinline__ DepthStep next(const Product& p) const {
    return k + kDepth < p.k ? DepthStep{k + kDepth, group} : DepthStep{0, group + 1};
  }
  template <class T>
  __device__ __forceinline__ Factor<T> of_a(const ProductTile<T>& tile) const {
    const Product& p = tile.p;
    return {tile.a + group * p.a_group_stride + k * p.a.col_stride, p.a.row_stride, p.a.col_stride, tile.rows,
            depth(p)};
  }
  template <class T>
  __device__ __forceinline__ Factor<T> of_b(const ProductTile<T>& tile) const {
    const Product& p = tile.p;
    return {tile.b + group * p.b_group_stride + k * p.b.row_stride, p.b.col_stride, p.b.row_stride, tile.cols,
            depth(p)};
  }

 private:
  __device__ __forceinline__ int depth(const Product& p) const { return static_cast<int>(min_of(p.k - k, kDepth)); }
};

// The barrier after a step was written to shared memory. Returns whether any thread replaced something of it.
__device__ __forceinline__ bool step_is_there(bool zero_hides, bool replaced) {
  if (zero_hides) return __syncthreads_or(replaced);
  __syncthreads();
  return false;
}

}  // namespace mha::cuda
