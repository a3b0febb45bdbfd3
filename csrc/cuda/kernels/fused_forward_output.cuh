// What a block of the fused forward on tensor cores writes: output, statistics, weights.
#pragma once
#include "fused_forward_tile.cuh"

namespace mha::cuda {

// Eight elements, as many as the head has, wherever they lie.
template <class T>
MHA_DEVICE void write_elements(T* to, int64_t stride, uint4 x, int count) {
  const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < kChunk; ++i)
    if (i < count) to[i * stride].bits = static_cast<uint16_t>(words[i / 2] >> i % 2 * 16);
}

// The warp's rows go to shared memory, where its queries were, and from there in whole chunks to global memory.
template <class Shape>
MHA_DEVICE void write_output(const ForwardTile<Shape>& tile, const float (&factor)[Shape::kRowTiles][2],
                             uint32_t shared) {
  using T = typename Shape::T;
  using Layout = TileLayout<Shape::kHead>;
  const FusedForward& p = tile.call.p;
  const int warp_row = tile.warp_row(), lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < Shape::kRowTiles; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int n = 0; n < Shape::kHead / 8; ++n) {
        const float (&x)[4] = tile.output[m][n];
        store_shared(shared + Layout::offset(warp_row + tile.row(m, h), n) + tile.t() * 4,
                     pack<T>(x[2 * h] * factor[m][h], x[2 * h + 1] * factor[m][h]));
      }
  __syncwarp();
  constexpr int kChunks = Shape::kHead / kChunk;
  const int64_t first_query = tile.first_query();
  T* const output = tile.place.result(Placement<T>::kOutput);
#pragma unroll 4
  for (int i = lane; i < Shape::kWarpRows * kChunks; i += 32) {
    const int row = i / kChunks, chunk = i % kChunks, left = static_cast<int>(p.value_dim) - chunk * kChunk;
    const int64_t query = first_query + row;
    if (query >= p.queries || left <= 0) continue;
    const uint4 x = load_shared_16(shared + Layout::offset(warp_row + row, chunk));
    T* to = output + query * p.output.row_stride + chunk * kChunk * p.output.col_stride;
    if (tile.call.output_chunks) *reinterpret_cast<uint4*>(to) = x;
    else write_elements(to, p.output.col_stride, x, left);
  }
}

// A part of the keys leaves its sums as they are.
template <class Shape>
MHA_DEVICE void write_partial(const ForwardTile<Shape>& tile) {
  const Partials<float> partials(tile.call.p, tile.call.parts);
#pragma unroll
  for (int m = 0; m < Shape::kRowTiles; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t query = tile.query_index(m, h);
      if (query >= partials.queries) continue;
      float* to = partials.at(tile.place.entry, query, tile.place.part);
#pragma unroll
      for (int n = 0; n < Shape::kHead / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int d = n * 8 + 2 * tile.t() + e;
          if (d < partials.value_dim) to[d] = tile.output[m][n][2 * h + e];
        }
      if (tile.t() != 0) continue;
      const RowStatistics<float> row = tile.statistics(m, h);
      to[partials.value_dim] = row.max;
      to[partials.value_dim + 1] = row.sum;
    }
}

template <class Shape>
MHA_DEVICE void write_row_statistics(const ForwardTile<Shape>& tile) {
  if (!tile.call.p.row_max || tile.t() != 0) return;
#pragma unroll
  for (int m = 0; m < Shape::kRowTiles; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t query = tile.query_index(m, h);
      if (query < tile.call.p.queries) tile.place.write_statistics(tile.call.p, query, tile.statistics(m, h));
    }
}

// Four lanes that share a row exchange words: lane t gets word t of each, in their order.
MHA_DEVICE void transpose_in_quad(uint32_t (&word)[4], int t) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      uint32_t &low = word[i], &high = word[i + step];
      const uint32_t got = __shfl_xor_sync(~0u, t & step ? low : high, step);
      (t & step ? low : high) = got;
    }
}

// Weights of a tile of keys, in whole chunks of 16 bytes where they lie so; those of keys that no query sees are zeros
// and are written as well.
template <class Shape>
MHA_DEVICE void write_weights(const ForwardTile<Shape>& tile, const float (&s)[Shape::kRowTiles][Shape::kKeys / 8][4],
                              int64_t first_key) {
  using T = typename Shape::T;
  const FusedForward& p = tile.call.p;
  T* const weights = tile.place.result(Placement<T>::kWeights);
#pragma unroll
  for (int m = 0; m < Shape::kRowTiles; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int n = 0; n < Shape::kKeys / 8; n += 4) {
        uint32_t word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) word[i] = pack<T>(s[m][n + i][2 * h], s[m][n + i][2 * h + 1]);
        transpose_in_quad(word, tile.t());
        const int64_t query = tile.query_index(m, h), key = first_key + (n + tile.t()) * kChunk, left = p.keys - key;
        if (query >= p.queries || left <= 0) continue;
        T* const to = weights + query * p.weights.row_stride + key * p.weights.col_stride;
        const uint4 x = make_uint4(word[0], word[1], word[2], word[3]);
        if (p.weights.col_stride == 1 && left >= kChunk && reinterpret_cast<uintptr_t>(to) % 16 == 0)
          *reinterpret_cast<uint4*>(to) = x;
        else write_elements(to, p.weights.col_stride, x, static_cast<int>(min_of(kChunk, left)));
      }
}

}  // namespace mha::cuda
