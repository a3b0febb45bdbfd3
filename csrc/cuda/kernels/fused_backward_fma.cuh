// The gradients of query, key and value by multiply-adds. A block keeps a tile of keys and goes through the queries of
// all heads that share them (dK, dV), or keeps a tile of queries and goes through the keys (dQ):
//   S, dP         fused_backward_fma_tile.cuh; S with the bits of the forward
//   P, dS         fused_backward_rules.cuh; to shared memory, one after the other
//   dV += P dO,  dK += dS Q,  dQ += dS K
// No block adds to what another one writes, and each adds in the order of its walk: results are the same on every run.
#pragma once
#include "fused_backward_fma_tile.cuh"

namespace mha::cuda {

// Columns of dQ, dK and dV that a block sums up, 16 of a tile's columns in each thread. With more of them other blocks
// work out the same P and dS for the others: registers hold no more.
template <class Acc>
constexpr int kFmaPieces = sizeof(Acc) == 8 ? 1 : 2;
template <class Acc>
constexpr int kFmaColumns = kFmaPieces<Acc> * kGradTile;

template <class Acc>
using FmaSums = Acc[kFmaPieces<Acc>][kFmaOwn][kFmaOwn];

// sums += weights . b, columns [column, column + kFmaColumns) of b. Where a weight is 0 the term is, whatever b holds.
template <class T, class Acc>
__device__ void add_weighted_rows(FmaSums<Acc>& sums, FmaShared<Acc>& shared, const TileRows<T>& b, int64_t column) {
  constexpr int kRows = 2 * FmaShared<Acc>::kDepth;
  const FmaThread own = FmaThread::own();
#pragma unroll
  for (int piece = 0; piece < kFmaPieces<Acc>; ++piece) {
    const int64_t first = column + piece * kGradTile;
    if (first >= b.cols) break;
    for (int begin = 0; begin < kGradTile; begin += kRows) {
      __syncthreads();
#pragma unroll 2
      for (int i = static_cast<int>(threadIdx.x); i < kRows * kGradTile; i += kGradFmaThreads)
        shared.staged[i / kGradTile][i % kGradTile] = b.at(begin + i / kGradTile, first + i % kGradTile);
      __syncthreads();
#pragma unroll 4
      for (int k = 0; k < kRows; ++k) {
        const Four<Acc> w = four(&shared.weights[begin + k][kFmaOwn * own.y]),
                        x = four(&shared.staged[k][kFmaOwn * own.x]);
#pragma unroll
        for (int r = 0; r < kFmaOwn; ++r)
#pragma unroll
          for (int c = 0; c < kFmaOwn; ++c)
            if (w.x[r] != 0) sums[piece][r][c] = fma(w.x[r], x.x[c], sums[piece][r][c]);
      }
    }
  }
}

template <class T, class Acc>
__device__ void write_rows(const FmaSums<Acc>& sums, const BatchShape& batch, int64_t entry, const Output& out,
                           int64_t first_row, int64_t rows, int64_t column, int64_t cols, Acc factor) {
  const FmaThread own = FmaThread::own();
  T* to = matrix<T>(batch, entry, out);
#pragma unroll
  for (int piece = 0; piece < kFmaPieces<Acc>; ++piece)
#pragma unroll
    for (int r = 0; r < kFmaOwn; ++r)
#pragma unroll
      for (int c = 0; c < kFmaOwn; ++c) {
        const int64_t row = first_row + kFmaOwn * own.y + r, col = column + piece * kGradTile + kFmaOwn * own.x + c;
        if (row < rows && col < cols)
          to[row * out.row_stride + col * out.col_stride] = from_accumulate<T>(sums[piece][r][c] * factor);
      }
}

// Parts of the columns of what a block sums up.
template <class Acc>
MHA_INLINE int64_t key_value_parts(const FusedBackward& p) {
  return ceil_div(max_of(p.grad_key ? p.head_dim : 0, p.grad_value ? p.value_dim : 0), kFmaColumns<Acc>);
}
template <class Acc>
MHA_INLINE int64_t query_parts(const FusedBackward& p) {
  return ceil_div(p.head_dim, kFmaColumns<Acc>);
}

// dK and dV of one tile, which counts through all key/value heads, and one part of their columns.
template <class T>
__device__ void key_value_tile(const GradCall<accumulate_t<T>>& call, FmaShared<accumulate_t<T>>& shared, int64_t tile,
                               int64_t part) {
  using Acc = accumulate_t<T>;
  const FusedBackward& p = call.p;
  const int64_t tiles = ceil_div(p.keys, kGradTile), first_key = tile % tiles * kGradTile;
  const int64_t first_entry = tile / tiles * p.group;
  const int column = static_cast<int>(part) * kFmaColumns<Acc>;
  const FmaThread own = FmaThread::own();
  FmaSums<Acc> key_sums = {}, value_sums = {};
  for (int64_t i = 0; i < p.group; ++i) {
    const int64_t entry = first_entry + i;
    const GradRules<T> rules(call, entry);
    const TileWalk walk = query_tiles(rules.visibility, p.queries, kGradTile, first_key,
                                      min_of(first_key + kGradTile, p.keys), call.logits.hidden_have_weight);
    for (uint32_t step = 0; step < walk.count(); ++step) {
      const int64_t query = walk.tile(step) * kGradTile;
      FmaPairs<T, true> pairs(rules, query, first_key, step < walk.masked());
      if (!__syncthreads_or(pairs.seen != 0) && !call.logits.hidden_have_weight) continue;
      load_rows(rules, query, shared.queries);
      const auto queries = TileRows<T>::of(p.batch, entry, p.query, query, p.queries, p.head_dim);
      const auto grads = TileRows<T>::of(p.batch, entry, p.grad_output, query, p.queries, p.value_dim);
      pairs.multiply(shared, queries, TileRows<T>::of(p.batch, entry, p.key, first_key, p.keys, p.head_dim), grads,
                     TileRows<T>::of(p.batch, entry, p.value, first_key, p.keys, p.value_dim));
      pairs.each(rules, call.drops, shared.queries, query, [&](int r, int c, const GradTerms<Acc>& terms) {
        shared.weights[kFmaOwn * own.x + c][kFmaOwn * own.y + r] = terms.kept;
        pairs.scores[r][c] = terms.score_grad;
      });
      if (p.grad_value) add_weighted_rows(value_sums, shared, grads, column);
      if (!p.grad_key) continue;
      __syncthreads();
#pragma unroll
      for (int r = 0; r < kFmaOwn; ++r)
#pragma unroll
        for (int c = 0; c < kFmaOwn; ++c) shared.weights[kFmaOwn * own.x + c][kFmaOwn * own.y + r] = pairs.scores[r][c];
      add_weighted_rows(key_sums, shared, queries, column);
    }
  }
  if (p.grad_key)
    write_rows<T>(key_sums, p.batch, first_entry, p.grad_key, first_key, p.keys, column, p.head_dim, call.logits.scale);
  if (p.grad_value)
    write_rows<T>(value_sums, p.batch, first_entry, p.grad_value, first_key, p.keys, column, p.value_dim,
                  call.keep_scale);
}

// dQ of one tile, which counts through all query heads, and one part of its columns.
template <class T>
__device__ void query_tile(const GradCall<accumulate_t<T>>& call, FmaShared<accumulate_t<T>>& shared, int64_t tile,
                           int64_t part) {
  using Acc = accumulate_t<T>;
  const FusedBackward& p = call.p;
  const int64_t tiles = ceil_div(p.queries, kGradTile), entry = tile / tiles;
  const int64_t first_query = (tile - entry * tiles) * kGradTile,
                end_query = min_of(first_query + kGradTile, p.queries);
  const int64_t column = part * kFmaColumns<Acc>;
  const FmaThread own = FmaThread::own();
  const GradRules<T> rules(call, entry);
  const TileWalk walk =
      key_tiles(rules.visibility, p.keys, kGradTile, first_query, end_query, call.logits.hidden_have_weight);
  load_rows(rules, first_query, shared.queries);
  FmaSums<Acc> sums = {};
  for (uint32_t step = 0; step < walk.count(); ++step) {
    const int64_t key = walk.tile(step) * kGradTile;
    FmaPairs<T, false> pairs(rules, first_query, key, step < walk.masked());
    if (!__syncthreads_or(pairs.seen != 0) && !call.logits.hidden_have_weight) continue;
    const auto keys = TileRows<T>::of(p.batch, entry, p.key, key, p.keys, p.head_dim);
    pairs.multiply(shared, TileRows<T>::of(p.batch, entry, p.query, first_query, p.queries, p.head_dim), keys,
                   TileRows<T>::of(p.batch, entry, p.grad_output, first_query, p.queries, p.value_dim),
                   TileRows<T>::of(p.batch, entry, p.value, key, p.keys, p.value_dim));
    pairs.each(rules, call.drops, shared.queries, first_query, [&](int r, int c, const GradTerms<Acc>& terms) {
      shared.weights[kFmaOwn * own.x + c][kFmaOwn * own.y + r] = terms.score_grad;
    });
    add_weighted_rows(sums, shared, keys, column);
  }
  write_rows<T>(sums, p.batch, entry, p.grad_query, first_query, p.queries, column, p.head_dim, call.logits.scale);
}

template <class Acc>
__device__ FmaShared<Acc>& fma_shared() {
  extern __shared__ __align__(16) unsigned char memory[];
  return *reinterpret_cast<FmaShared<Acc>*>(memory);
}

template <class T>
__global__ void __launch_bounds__(kGradFmaThreads)
    fused_key_value_fma(const __grid_constant__ GradCall<accumulate_t<T>> call) {
  using Acc = accumulate_t<T>;
  const int64_t parts = key_value_parts<Acc>(call.p), tile = blockIdx.x / parts;
  key_value_tile<T>(call, fma_shared<Acc>(), tile, blockIdx.x - tile * parts);
}

template <class T>
__global__ void __launch_bounds__(kGradFmaThreads)
    fused_query_fma(const __grid_constant__ GradCall<accumulate_t<T>> call) {
  using Acc = accumulate_t<T>;
  // With causality the last queries have the most to do: they come first.
  const int64_t parts = query_parts<Acc>(call.p), turn = blockIdx.x / parts;
  query_tile<T>(call, fma_shared<Acc>(), query_tiles_of(call.p) - 1 - turn, blockIdx.x - turn * parts);
}

}  // namespace mha::cuda
