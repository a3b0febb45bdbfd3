// Fused forward on tensor cores, bfloat16 and float16: for the queries of a block, tile by tile of keys,
//   S = Q K^T                      tile of scores
//   m' = max(m, max S)             running row maximum
//   P = e^(S - m')
//   l = l e^(m - m') + sum P       running row sum
//   O = O e^(m - m') + P V         running output
// and at the end O / l. Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao,
// "FlashAttention-2", 2023. Tiles, their sums and the row statistics live in registers; here is what becomes of them,
// in fused_forward_block.cuh which tiles are visited.
#pragma once
#include "fused_placement.cuh"
#include "fused_values.cuh"

namespace mha::cuda {

// plain: nothing but visibility, and rows in whole chunks. options: everything but returned weights.
enum class Way { plain, options, weights };

// kHead: room for head_dim and value_dim. kRowTiles: groups of 16 queries of a warp.
template <class T_, int kHead_, int kRowTiles_, Way kWay_>
struct ForwardShape {
  using T = T_;
  static constexpr int kHead = kHead_, kRowTiles = kRowTiles_;
  static constexpr Way kWay = kWay_;
  static constexpr int kWarpRows = 16 * kRowTiles, kRows = kThreads / 32 * kWarpRows;
  // 32 where heads are 256 wide: keys and values, twice, and their queries still fit into 99 KB, which every
  // architecture has. And where 32 queries a warp have 128 wide heads: registers hold it without spills, and two blocks
  // fit into 164 KB.
  static constexpr int kKeys = kHead * kRowTiles >= 256 ? 32 : 64;
  static constexpr bool kQueriesInRegisters = kHead * kRowTiles <= 128;  // 16 * kRowTiles registers at most
  static constexpr int kQueryBytes = kRows * kHead * 2, kKeyBytes = kKeys * kHead * 2;
  static constexpr int kSharedBytes = kQueryBytes + 4 * kKeyBytes;
};

template <class Shape>
struct ForwardTile {
  using T = typename Shape::T;
  static constexpr int kHead = Shape::kHead, kRowTiles = Shape::kRowTiles, kKeys = Shape::kKeys;
  static constexpr Way kWay = Shape::kWay;
  using Scores = float[kRowTiles][kKeys / 8][4];

  const ForwardCall<float>& call;
  const Placement<T>& place;
  TileFragments<kHead> queries;
  uint32_t query[Shape::kQueriesInRegisters ? kHead / 16 : 1][kRowTiles][4];
  float output[kRowTiles][kHead / 8][4];
  // Of rows g and g + 8. row_max: the statistic, or with care the row's largest number; row_sum: of the lane's keys.
  float row_max[kRowTiles][2], row_sum[kRowTiles][2];

  __device__ __forceinline__ ForwardTile(const ForwardCall<float>& c, const Placement<T>& placement)
      : call(c), place(placement) {}

  // The lane's place in tiles C (primitives.cuh).
  static __device__ __forceinline__ int g() { return threadIdx.x % 32 / 4; }
  static __device__ __forceinline__ int t() { return threadIdx.x % 4; }
  __device__ __forceinline__ bool scaled() const { return kWay != Way::plain && call.logits.scaled; }
  __device__ __forceinline__ RowShift<float> shift(int m, int h, bool careful) const {
    return careful ? RowShift<float>::of_largest(row_max[m][h], call.logits.c, scaled())
                   : RowShift<float>::of(row_max[m][h], scaled());
  }
  __device__ __forceinline__ RowStatistics<float> statistics(int m, int h) const {
    if (place.careful) return RowStatistics<float>::of_largest(row_max[m][h], row_sum[m][h], call.logits.c, scaled());
    return RowStatistics<float>::of(row_max[m][h], row_sum[m][h], false);
  }
  // Of the warp's rows, and of all queries.
  __device__ __forceinline__ int row(int m, int h) const { return m * 16 + h * 8 + g(); }
  __device__ __forceinline__ int64_t query_index(int m, int h) const { return first_query() + row(m, h); }
  __device__ __forceinline__ int64_t first_query() const { return place.first_query + warp_row(); }
  // The warp's first row of the block's.
  static __device__ __forceinline__ int warp_row() {
    return worked_out_here(static_cast<int>(threadIdx.x)) / 32 * Shape::kWarpRows;
  }

  __device__ __forceinline__ void read_queries(uint32_t tile) {
    queries = TileFragments<kHead>::rows_first(tile, warp_row());
    if constexpr (Shape::kQueriesInRegisters) {
#pragma unroll
      for (int s = 0; s < kHead / 16; ++s)
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) load_matrices(query[s][m], queries.at(m, s));
    }
  }

  // The sink is a key without value.
  __device__ __forceinline__ void begin() {
    const float sink = kWay == Way::plain ? Logits<float>::kMinusInfinity : place.sink();
    const bool there = sink != Logits<float>::kMinusInfinity;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        row_max[m][h] = there ? sink : Logits<float>::kNothingYet;
        row_sum[m][h] = there && t() == 0 ? 1.0f : 0.0f;
      }
#pragma unroll
      for (int n = 0; n < kHead / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) output[m][n][e] = 0;
    }
  }

  // S = Q K^T
  __device__ __forceinline__ void score(Scores& s, uint32_t key_tile) const {
    const auto keys = TileFragments<kHead>::depth_first(key_tile);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[m][n][e] = 0;
#pragma unroll
    for (int d = 0; d < kHead / 16; ++d) {
      uint32_t a[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        if constexpr (Shape::kQueriesInRegisters) {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[m][i] = query[d][m][i];
        } else {
          load_matrices(a[m], queries.at(m, d));
        }
      }
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t b[4];
        load_matrices(b, keys.at(n, d));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          mma<T>(s[m][2 * n], a[m], b[0], b[1]);
          mma<T>(s[m][2 * n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  // Scores to what the exponential takes. `seen`: of the warp's row lane % kWarpRows, one bit per key that it sees.
  __device__ __forceinline__ void to_logits(Scores& s, int64_t first_key, uint64_t seen) const {
    const uint64_t existing = first_bits(call.p.keys - first_key) >> 2 * t();
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint64_t bits = __shfl_sync(~0u, seen, row(m, h)) >> 2 * t();
        if (scaled()) add_options(s[m], h, query_index(m, h), first_key, bits);
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[m][n][2 * h + e];
            if (bits >> (n * 8 + e) & 1) continue;
            x = kWay != Way::plain && existing >> (n * 8 + e) & 1 ? call.logits.hidden : Logits<float>::kMinusInfinity;
          }
      }
  }

  // Scale, softcap and bias of a row; the bias is read only where the key is seen.
  __device__ __forceinline__ void add_options(float (&s)[kKeys / 8][4], int h, int64_t query, int64_t first_key,
                                              uint64_t bits) const {
    const Input& bias = call.p.bias;
    const T* from = place.input(Placement<T>::kBias);
    if (from) from += query * bias.row_stride + (first_key + 2 * t()) * bias.col_stride;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float added = 0;
        if (from && bits >> (n * 8 + e) & 1) added = to_accumulate(from[(n * 8 + e) * bias.col_stride]);
        s[n][2 * h + e] = call.logits.logit(s[n][2 * h + e], added);
      }
  }

  // Logits to weights relative to the maximum so far, and what was summed before is rescaled to it. kOutput: there is
  // an output to rescale. careful: rows may be far, and "zero hides", so what has no weight any more is gone, and no
  // NaN of it stays.
  template <bool kOutput>
  __device__ __forceinline__ void softmax(Scores& s, bool careful) {
    const float c = call.logits.c;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float max = Logits<float>::kMinusInfinity;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) max = fmaxf(max, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
        max = fmaxf(max, __shfl_xor_sync(~0u, max, 1));
        max = fmaxf(max, __shfl_xor_sync(~0u, max, 2));
        const RowShift<float> before = shift(m, h, careful);
        row_max[m][h] = fmaxf(row_max[m][h], Logits<float>::statistic(max, c, scaled() || careful));
        const RowShift<float> after = shift(m, h, careful);
        const float factor = before.rescale(after, c);
        float sum = 0;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[m][n][2 * h + e];
            x = after.weight(x, c);
            sum += x;
          }
        row_sum[m][h] = fused_multiply_add(row_sum[m][h], factor, sum);
        if constexpr (kOutput) {
#pragma unroll
          for (int n = 0; n < kHead / 8; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              float& x = output[m][n][2 * h + e];
              x *= factor;
              if (careful && factor == 0 && x != 0) x = 0;  // 0 * inf and 0 * NaN; -0 stays
            }
        }
      }
  }

  // Logits to weights, divided by their sum.
  __device__ __forceinline__ void normalise(Scores& s, const float (&inverse)[kRowTiles][2], bool careful) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const RowShift<float> shift = this->shift(m, h, careful);
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[m][n][2 * h + e];
            x = shift.weight(x, call.logits.c);
            x = x == 0 ? 0 : x * inverse[m][h];  // also where the inverse is NaN
          }
      }
  }

  __device__ __forceinline__ void drop(Scores& s, int64_t first_key) const {
    if (!place.dropout.active()) return;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint64_t kept = kept_in_quad<kKeys>(place.dropout, query_index(m, h), first_key);
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (!(kept >> (n * 8 + e) & 1)) s[m][n][2 * h + e] = 0;
      }
  }

  // O += P V
  __device__ __forceinline__ void add(const Scores& s, uint32_t value_tile, bool careful) {
    const auto values = TileFragments<kHead>::rows_first(value_tile, 0);
    if (careful) add_values_carefully<T>(output, s, values);
    else add_values<T>(output, s, values);
  }

  // The row sums of all lanes.
  __device__ __forceinline__ void add_up_sums() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        row_sum[m][h] += __shfl_xor_sync(~0u, row_sum[m][h], 1);
        row_sum[m][h] += __shfl_xor_sync(~0u, row_sum[m][h], 2);
      }
  }

  // Nothing asks for care: no row is far, and all sums are finite. 0 * x is NaN for inf and NaN.
  __device__ __forceinline__ bool is_ordinary() const {
    float probe = 0;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int n = 0; n < kHead / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) probe = __fmaf_rn(output[m][n][e], 0.0f, probe);
    bool far = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        far |= !scaled() && abs(row_max[m][h]) >= Logits<float>::kFar && row_max[m][h] != Logits<float>::kNothingYet;
    return probe == 0 && !far;
  }
};

}  // namespace mha::cuda
