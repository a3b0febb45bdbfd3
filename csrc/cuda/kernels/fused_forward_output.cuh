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
                             typename Shape::T* output, uint32_t shared) {
  using T = typename Shape::T;
  using Layout = TileLayout<Shape::kHead>;
  const FusedForward& p = tile.call.p;
  const int warp_row = threadIdx.x / 32 * Shape::kWarpRows, lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < Shape::kRowTiles; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int n = 0; n < Shape::kHead / 8; ++n) {
        const float (&x)[4] = tile.output[m][n];
        store_shared(shared + Layout::offset(warp_row + tile.row(m, h), n) + tile.t * 4,
                     pack<T>(x[2 * h] * factor[m][h], x[2 * h + 1] * factor[m][h]));
      }
  __syncwarp();
  constexpr int kChunks = Shape::kHead / kChunk;
#pragma unroll 4
  for (int i = lane; i < Shape::kWarpRows * kChunks; i += 32) {
    const int row = i / kChunks, chunk = i % kChunks, left = static_cast<int>(p.value_dim) - chunk * kChunk;
    const int64_t query = tile.first_query + row;
    if (query >= p.queries || left <= 0) continue;
    const uint4 x = load_shared_16(shared + Layout::offset(warp_row + row, chunk));
    T* to = output + query * p.output.row_stride + chunk * kChunk * p.output.col_stride;
    if (tile.call.output_chunks) *reinterpret_cast<uint4*>(to) = x;
    else write_elements(to, p.output.col_stride, x, left);
  }
}

// A part of the keys leaves its sums as they are.
template <class Shape>
MHA_DEVICE void write_partial(const ForwardTile<Shape>& tile, int64_t part) {
  const Partials<float> partials(tile.call.p, tile.call.parts);
#pragma unroll
  for (int m = 0; m < Shape::kRowTiles; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t query = tile.first_query + tile.row(m, h);
      if (query >= partials.queries) continue;
      float* to = partials.at(tile.entry, query, part);
#pragma unroll
      for (int n = 0; n < Shape::kHead / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int d = n * 8 + 2 * tile.t + e;
          if (d < partials.value_dim) to[d] = tile.output[m][n][2 * h + e];
        }
      if (tile.t != 0) continue;
      to[partials.value_dim] = tile.row_sum[m][h] == 0 ? Logits<float>::kMinusInfinity : tile.row_max[m][h];
      to[partials.value_dim + 1] = tile.row_sum[m][h];
    }
}

template <class Shape>
MHA_DEVICE void write_row_statistics(const ForwardTile<Shape>& tile) {
  if (!tile.call.p.row_max || tile.t != 0) return;
#pragma unroll
  for (int m = 0; m < Shape::kRowTiles; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t query = tile.first_query + tile.row(m, h);
      if (query < tile.call.p.queries)
        write_statistics(tile.call.p, tile.entry, query, tile.row_max[m][h], tile.row_sum[m][h]);
    }
}

// Weights of a tile of keys; those of keys that no query sees are zeros and are written as well.
template <class Shape>
MHA_DEVICE void write_weights(const ForwardTile<Shape>& tile, const float (&s)[Shape::kRowTiles][Shape::kKeys / 8][4],
                              typename Shape::T* weights, int64_t first_key) {
  const FusedForward& p = tile.call.p;
#pragma unroll
  for (int m = 0; m < Shape::kRowTiles; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t query = tile.first_query + tile.row(m, h);
      if (query >= p.queries) continue;
      const int64_t key = first_key + 2 * tile.t;
      typename Shape::T* to = weights + query * p.weights.row_stride + key * p.weights.col_stride;
      const bool pairs = p.weights.col_stride == 1 && reinterpret_cast<uintptr_t>(to) % 4 == 0;
#pragma unroll
      for (int n = 0; n < Shape::kKeys / 8; ++n) {
        const uint32_t two = pack<typename Shape::T>(s[m][n][2 * h], s[m][n][2 * h + 1]);
        if (pairs && key + n * 8 + 1 < p.keys) {
          *reinterpret_cast<uint32_t*>(to + n * 8) = two;
        } else {
          if (key + n * 8 < p.keys) to[n * 8 * p.weights.col_stride].bits = static_cast<uint16_t>(two);
          if (key + n * 8 + 1 < p.keys) to[(n * 8 + 1) * p.weights.col_stride].bits = static_cast<uint16_t>(two >> 16);
        }
      }
    }
}

}  // namespace mha::cuda
