// What the kernels of the fused backward take.
#pragma once
#include "../../core/attention.h"
#include "fused_backward_walk.cuh"
#include "fused_dropout.cuh"
#include "fused_logits.cuh"

namespace mha::cuda {

// What is known of a query.
template <class Acc>
struct GradRow {
  // row_max of the forward; +inf where nothing has weight: rows that see nothing, and what fills up a tile. NaN where
  // the row saw NaN.
  Acc shift;
  Acc inverse;  // 1 / row_sum; negative in far rows (fused_logits.cuh)
  Acc delta;

  static __device__ __forceinline__ GradRow of(Acc row_max, Acc row_sum, Acc delta) {
    constexpr Acc kInfinity = static_cast<Acc>(__builtin_inf());
    if (row_sum == 0) return {kInfinity, 1, delta};
    return {row_sum - row_sum == 0 ? row_max : row_sum - row_sum, 1 / row_sum, delta};
  }
  static __device__ __forceinline__ GradRow none() { return of(0, 0, 0); }

  __device__ __forceinline__ bool is_far() const { return inverse < 0; }
  // P before dropout. far: the row may be far.
  __device__ __forceinline__ Acc weight(Acc x, Acc c, bool scaled, bool far) const {
    return RowShift<Acc>::of(shift, scaled || (far && is_far())).weight(x, c) * (far ? abs(inverse) : inverse);
  }
};

// Keeps the compiler from reading what comes later before this point: it would take registers that are not there.
MHA_DEVICE void keep_order() { asm volatile("" ::: "memory"); }

// Passed by value.
template <class Acc>
struct GradCall {
  FusedBackward p;
  Logits<Acc> logits;
  Acc keep_scale;  // of what dropout keeps
  bool drops;      // there is dropout
  float* rows;     // for the kernels on tensor cores: what is known of the queries, tile by tile, see GradRowTiles
  bool query_chunks, key_chunks, value_chunks, grad_chunks;  // rows lie in whole aligned chunks (fused_tiles.cuh)
};

// Tiles of keys of all key/value heads, and of queries of all query heads.
MHA_INLINE int64_t key_tiles_of(const FusedBackward& p) {
  return p.batch.count() / p.group * ceil_div(p.keys, kGradTile);
}
MHA_INLINE int64_t query_tiles_of(const FusedBackward& p) { return p.batch.count() * ceil_div(p.queries, kGradTile); }

// What is known of the queries, so that it can be copied as tiles are: for each tile of an entry kGradTile times
// `shift`, then `shift` once more, but NaN in far rows (fused_logits.cuh), then `inverse`, then `delta`. Who takes the
// second need not look for far rows: his sums show whether there were any.
struct GradRowTiles {
  static constexpr int kShift = 0, kNearShift = kGradTile, kInverse = 2 * kGradTile, kDelta = 3 * kGradTile;

  float* first;
  int64_t queries;

  static MHA_INLINE_MEMBER int64_t count(const FusedBackward& p) { return query_tiles_of(p) * 4 * kGradTile; }
  // Of a query; what is known of it lies at the distances above.
  MHA_INLINE_MEMBER float* at(int64_t entry, int64_t query) const {
    const int64_t tile = entry * ceil_div(queries, kGradTile) + query / kGradTile;
    return first + tile * 4 * kGradTile + query % kGradTile;
  }
  __device__ __forceinline__ void write(int64_t entry, int64_t query, const GradRow<float>& row) const {
    float* to = at(entry, query);
    to[kShift] = row.shift;
    to[kNearShift] = row.is_far() ? __builtin_nanf("") : row.shift;
    to[kInverse] = row.inverse;
    to[kDelta] = row.delta;
  }
};

}  // namespace mha::cuda
