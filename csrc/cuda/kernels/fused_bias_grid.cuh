// How the gradient of the bias is shared among blocks, by multiply-adds and on tensor cores alike. It is dx of
// fused_backward_rules.cuh, summed over everything that shares an element of the bias. A block has a tile of one matrix
// of the bias, or all queries (all keys) where the bias has one row (column) for them; it goes through the entries that
// share the matrix in order and works out their P and dP once more. So nothing of the size of the scores is kept, and
// the order of additions is fixed.
#pragma once
#include "../../core/bias_sharing.h"
#include "fused_backward_call.cuh"

namespace mha::cuda {

// What a block has: queries and keys of one matrix of the bias.
struct BiasShare {
  int64_t matrix, query, end_query, key, end_key;
};

struct BiasGrid {
  BiasSharing heads;
  bool one_row, one_column;
  int tile_keys;                   // keys of a tile; queries: kGradTile
  int64_t query_tiles, key_tiles;  // of a matrix, that blocks are cut by

  MHA_INLINE_MEMBER static BiasGrid of(const FusedBackward& p, int tile_keys) {
    BiasGrid grid;
    grid.heads = BiasSharing::of(p, p.batch.ndim);
    grid.one_row = bias_has_one_row(p);
    grid.one_column = bias_has_one_column(p);
    grid.tile_keys = tile_keys;
    grid.query_tiles = grid.one_row ? 1 : ceil_div(p.queries, kGradTile);
    grid.key_tiles = grid.one_column ? 1 : ceil_div(p.keys, tile_keys);
    return grid;
  }
  MHA_INLINE_MEMBER int64_t blocks() const { return heads.matrices.count() * query_tiles * key_tiles; }

  __device__ __forceinline__ BiasShare share(const FusedBackward& p, uint32_t block) const {
    const int64_t of_matrix = query_tiles * key_tiles;
    const int64_t query = block % of_matrix / key_tiles * kGradTile, key = block % key_tiles * tile_keys;
    return {block / of_matrix, query, one_row ? p.queries : min_of(query + kGradTile, p.queries), key,
            one_column ? p.keys : min_of(key + tile_keys, p.keys)};
  }

  // The tiles of keys that the block has to look at for queries [query, query + kGradTile) of an entry, in order.
  __device__ __forceinline__ TileWalk walk(const FusedBackward& p, const BatchVisibility& v, const BiasShare& share,
                                           int64_t query) const {
    TileWalk w = key_tiles_seen(v, p, query);
    w.first = static_cast<uint32_t>(max_of(w.first, share.key / tile_keys));
    w.end = static_cast<uint32_t>(max_of(w.first, min_of(w.end, ceil_div(share.end_key, tile_keys))));
    return w;
  }

  // sums[row][column] of a tile, in shared memory; where the bias has one row (column), their sum over the rows
  // (columns), always in order.
  template <class T>
  __device__ void write(const accumulate_t<T>* sums, int stride, const FusedBackward& p, const BiasShare& share) const {
    T* to = matrix<T>(p.batch, heads.entry(share.matrix, 0), p.grad_bias);
    const int rows = one_row ? 1 : kGradTile, cols = one_column ? 1 : tile_keys;
    for (int i = static_cast<int>(threadIdx.x); i < rows * cols; i += static_cast<int>(blockDim.x)) {
      const int row = i / cols, col = i % cols;
      accumulate_t<T> sum = 0;
      for (int r = row; r < (one_row ? kGradTile : row + 1); ++r)
        for (int c = col; c < (one_column ? tile_keys : col + 1); ++c) sum += sums[r * stride + c];
      if (share.query + row < p.queries && share.key + col < p.keys)
        to[(share.query + row) * p.grad_bias.row_stride + (share.key + col) * p.grad_bias.col_stride] =
            from_accumulate<T>(sum);
    }
  }

 private:
  // Hidden keys have no gradient here, whatever their weight.
  __device__ __forceinline__ TileWalk key_tiles_seen(const BatchVisibility& v, const FusedBackward& p,
                                                     int64_t query) const {
    return mha::cuda::key_tiles(v, p.keys, tile_keys, query, min_of(query + kGradTile, p.queries), false);
  }
};

}  // namespace mha::cuda
