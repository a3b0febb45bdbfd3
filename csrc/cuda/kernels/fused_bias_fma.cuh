// The gradient of the bias by multiply-adds: dx of fused_backward_rules.cuh, summed over everything that shares an
// element of the bias. A block has a tile of one matrix of the bias, or all queries (all keys) where the bias has one
// row (column) for them; it goes through the entries that share the matrix in order and works out their P and dP once
// more. So nothing of the size of the scores is kept, and the order of additions is fixed.
#pragma once
#include "../../core/bias_sharing.h"
#include "fused_backward_fma_tile.cuh"

namespace mha::cuda {

struct BiasGrid {
  BiasSharing heads;
  bool one_row, one_column;
  int64_t query_tiles, key_tiles;  // of a matrix, that blocks are cut by

  MHA_INLINE_MEMBER static BiasGrid of(const FusedBackward& p) {
    BiasGrid grid;
    grid.heads = BiasSharing::of(p, p.batch.ndim);
    grid.one_row = bias_has_one_row(p);
    grid.one_column = bias_has_one_column(p);
    grid.query_tiles = grid.one_row ? 1 : ceil_div(p.queries, kGradTile);
    grid.key_tiles = grid.one_column ? 1 : ceil_div(p.keys, kGradTile);
    return grid;
  }
  MHA_INLINE_MEMBER int64_t blocks() const { return heads.matrices.count() * query_tiles * key_tiles; }
};

template <class Acc>
using FmaBiasSums = Acc[kFmaOwn][kFmaOwn];

// sums += dx of one tile of one entry.
template <class T, class Acc>
__device__ void add_bias_tile(FmaBiasSums<Acc>& sums, FmaShared<Acc>& shared, const GradRules<T>& rules, bool drops,
                              int64_t query, int64_t key, bool masked) {
  const FusedBackward& p = rules.p;
  FmaPairs<T, false> pairs(rules, query, key, masked);
  // Hidden keys have no gradient here, whatever their weight.
  if (!__syncthreads_or(pairs.seen != 0)) return;
  load_rows(rules, query, shared.queries);
  pairs.multiply(shared, TileRows<T>::of(p.batch, rules.entry, p.query, query, p.queries, p.head_dim),
                 TileRows<T>::of(p.batch, rules.entry, p.key, key, p.keys, p.head_dim),
                 TileRows<T>::of(p.batch, rules.entry, p.grad_output, query, p.queries, p.value_dim),
                 TileRows<T>::of(p.batch, rules.entry, p.value, key, p.keys, p.value_dim));
  pairs.each(rules, drops, shared.queries, query,
             [&](int r, int c, const GradTerms<Acc>& terms) { sums[r][c] += terms.logit_grad; });
}

// Writes a tile of sums; where the bias has one row (column), their sum over the rows (columns), always in order.
template <class T, class Acc>
__device__ void write_bias(const FmaBiasSums<Acc>& sums, FmaShared<Acc>& shared, const FusedBackward& p,
                           const BiasGrid& grid, int64_t entry, int64_t query, int64_t key) {
  const FmaThread own = FmaThread::own();
#pragma unroll
  for (int r = 0; r < kFmaOwn; ++r)
#pragma unroll
    for (int c = 0; c < kFmaOwn; ++c) shared.weights[kFmaOwn * own.y + r][kFmaOwn * own.x + c] = sums[r][c];
  __syncthreads();
  T* to = matrix<T>(p.batch, entry, p.grad_bias);
  const int rows = grid.one_row ? 1 : kGradTile, cols = grid.one_column ? 1 : kGradTile;
  for (int i = static_cast<int>(threadIdx.x); i < rows * cols; i += kFmaThreads) {
    const int row = i / cols, col = i % cols;
    Acc sum = 0;
    for (int r = row; r < (grid.one_row ? kGradTile : row + 1); ++r)
      for (int c = col; c < (grid.one_column ? kGradTile : col + 1); ++c) sum += shared.weights[r][c];
    if (query + row < p.queries && key + col < p.keys)
      to[(query + row) * p.grad_bias.row_stride + (key + col) * p.grad_bias.col_stride] = narrow<T>(sum);
  }
}

template <class T>
__global__ void __launch_bounds__(kFmaThreads)
    fused_bias_fma(const __grid_constant__ GradCall<accumulate_t<T>> call, const __grid_constant__ BiasGrid grid) {
  using Acc = accumulate_t<T>;
  const FusedBackward& p = call.p;
  extern __shared__ __align__(16) unsigned char memory[];
  FmaShared<Acc>& shared = *reinterpret_cast<FmaShared<Acc>*>(memory);
  const int64_t of_matrix = grid.query_tiles * grid.key_tiles, matrix = blockIdx.x / of_matrix;
  const int64_t query = blockIdx.x % of_matrix / grid.key_tiles * kGradTile,
                key = blockIdx.x % grid.key_tiles * kGradTile;
  const int64_t end_query = grid.one_row ? p.queries : min_of(query + kGradTile, p.queries);
  const int64_t end_key = grid.one_column ? p.keys : min_of(key + kGradTile, p.keys);

  FmaBiasSums<Acc> sums = {};
  for (int64_t shares = 0; shares < grid.heads.sharing.count(); ++shares) {
    const int64_t entry = grid.heads.entry(matrix, shares);
    const GradRules<T> rules(call, entry);
    for (int64_t i = query; i < end_query; i += kGradTile) {
      const TileWalk walk = key_tiles(rules.visibility, p.keys, kGradTile, i, min_of(i + kGradTile, p.queries), false);
      const int64_t first = max_of(walk.first, key / kGradTile), end = min_of(walk.end, ceil_div(end_key, kGradTile));
      for (int64_t tile = first; tile < end; ++tile)
        add_bias_tile(sums, shared, rules, call.drops, i, tile * kGradTile,
                      tile < walk.open_begin || tile >= walk.open_end);
    }
  }
  write_bias<T>(sums, shared, p, grid, grid.heads.entry(matrix, 0), query, key);
}

}  // namespace mha::cuda
