// Fused backward on tensor cores, bfloat16 and float16: what a warp does with its 16 rows that stay and a tile of rows
// that move. Keys stay and queries move for dK and dV; queries stay and keys move for dQ.
//   S = K Q^T or Q K^T           the sums of the forward, element by element
//   dP = V dO^T or dO V^T
//   P, dS                        in the registers of S and dP: narrowed they are the left factor of
//   dV += P dO,  dK += dS Q      or  dQ += dS K
// Dao, "FlashAttention-2", 2023.
//
// "Zero hides" (docs/notation.md), but 0 * NaN is NaN. So a block whose sums are not finite does it all again with
// care, in case what spoilt them was hidden: the same arithmetic, but where P is 0 so is dS, whatever dP is, and the
// last products are those of fused_values.cuh. These take no sign of dS into account, and need not: where Q or K is not
// finite, S is not, and so dS is 0 or NaN. Far rows (fused_logits.cuh) are left to that as well: until then their shift
// is NaN.
#pragma once
#include "fused_backward_pairs.cuh"
#include "fused_values.cuh"

namespace mha::cuda {

// plain: nothing but visibility, and rows in whole chunks. options: everything.
enum class GradWay { plain, options };

// kHead: room for head_dim and value_dim.
template <class T_, int kHead_, bool kKeysStay_, GradWay kWay_>
struct GradShape {
  using T = T_;
  static constexpr int kHead = kHead_;
  static constexpr bool kKeysStay = kKeysStay_;
  static constexpr GradWay kWay = kWay_;
  static constexpr int kRows = kGradTile;  // that stay: 16 of each warp
  // Larger heads leave no registers for more, options fewer still where a block has two results; and where heads are
  // 256 wide, all tiles fit into 99 KB, which every architecture has.
  static constexpr bool kCrowded = kKeysStay && kWay == GradWay::options;
  static constexpr int kMoving = kHead > 128 || (kHead == 128 && kCrowded) ? 16
                                 : kHead > 64 || (kHead == 64 && kCrowded) ? 32
                                                                           : kGradTile;
  // Columns of the results that a block has; the other parts of 256 do not fit into its registers and are for other
  // blocks, which compute S and dP once more.
  static constexpr int kColumns = kHead <= 128 ? kHead : 128, kParts = kHead / kColumns;
  static constexpr int kQueries = kKeysStay ? kMoving : kRows, kKeys = kKeysStay ? kRows : kMoving;
  static constexpr bool kStayInRegisters = kHead <= 64 && kWay == GradWay::plain;  // options need the registers
  static constexpr int kStayBytes = kRows * kHead * 2, kMovingBytes = kMoving * kHead * 2;
  // Shift, inverse and delta of queries that move; tiles behind them begin at a multiple of 128 bytes.
  static constexpr int kRowBytes = (3 * kMoving * 4 + 127) / 128 * 128;
  static constexpr int kBufferBytes = 2 * kMovingBytes + (kKeysStay ? kRowBytes : 0);
  static_assert(kBufferBytes % 128 == 0);
  static constexpr int kSharedBytes = 2 * kStayBytes + 2 * kBufferBytes + static_cast<int>(sizeof(PairBits));
};

template <class Shape>
struct GradTile {
  using T = typename Shape::T;
  static constexpr int kHead = Shape::kHead, kMoving = Shape::kMoving;
  static constexpr bool kKeysStay = Shape::kKeysStay;
  using Pairs = float[1][kMoving / 8][4];

  const GradCall<float>& call;
  const int warp_row = threadIdx.x / 32 * 16, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  TileFragments<kHead> stay;  // of K or Q; V or dO lie kStayBytes behind it
  uint32_t stay_registers[2][Shape::kStayInRegisters ? kHead / 16 : 1][4];
  GradRow<float> row[2];                        // queries g and g + 8 that stay
  float score_sums[1][Shape::kColumns / 8][4];  // dK or dQ, not yet scaled
  float value_sums[1][kKeysStay ? Shape::kColumns / 8 : 1][4];

  __device__ __forceinline__ explicit GradTile(const GradCall<float>& c) : call(c) {}

  __device__ __forceinline__ void clear() {
    const auto zero = [](auto& sums) {
#pragma unroll
      for (auto& tile : sums[0])
#pragma unroll
        for (float& x : tile) x = 0;
    };
    zero(score_sums);
    zero(value_sums);
  }

  // Of the results.
  static __device__ __forceinline__ int first_column() {
    return Shape::kParts == 1 ? 0 : static_cast<int>(blockIdx.x % Shape::kParts) * Shape::kColumns;
  }

  // Address of columns 16 d to 16 d + 15 of what stays.
  __device__ __forceinline__ uint32_t stay_at(int which, int d) const {
    return stay.at(0, d) + which * Shape::kStayBytes;
  }

  __device__ __forceinline__ void read_stay(uint32_t first) {
    stay = TileFragments<kHead>::rows_first(first, warp_row);
    if constexpr (Shape::kStayInRegisters) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int d = 0; d < kHead / 16; ++d) load_matrices(stay_registers[i][d], stay_at(i, d));
    }
  }

  // S (which = 0) or dP (which = 1).
  template <int which>
  __device__ __forceinline__ void multiply(Pairs& s, uint32_t moving_tile) const {
    const auto moving = TileFragments<kHead>::depth_first(moving_tile);
#pragma unroll
    for (int n = 0; n < kMoving / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[0][n][e] = 0;
    // Not all of 256: the addresses ahead would take registers that are not there.
#pragma unroll(kHead > 128 ? 4 : kHead / 16)
    for (int d = 0; d < kHead / 16; ++d) {
      uint32_t a[4];
      if constexpr (Shape::kStayInRegisters) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = stay_registers[which][d][i];
      } else {
        load_matrices(a, stay_at(which, d));
      }
#pragma unroll
      for (int n = 0; n < kMoving / 16; ++n) {
        uint32_t b[4];
        load_matrices(b, moving.at(n, d));
        mma<T>(s[0][2 * n], a, b[0], b[1]);
        mma<T>(s[0][2 * n + 1], a, b[2], b[3]);
      }
    }
  }

  // What is known of the query of element e of C tile n: `rows` is shared memory.
  __device__ __forceinline__ GradRow<float> query_row(const float* rows, int n, int e) const {
    if constexpr (!kKeysStay) return row[e / 2];
    const int i = n * 8 + 2 * t + e % 2;
    return {rows[i], rows[kMoving + i], rows[2 * kMoving + i]};
  }

  // S and dP become P and dS, where no option asks for more; hidden pairs have the score -inf.
  template <bool kCareful>
  __device__ __forceinline__ void finish_open(Pairs& s, Pairs& dp, const float* rows) const {
#pragma unroll
    for (int n = 0; n < kMoving / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const GradRow<float> r = query_row(rows, n, e);
        float weight = r.weight(s[0][n][e], call.logits.c, false, kCareful);
        if (kCareful && s[0][n][e] == Logits<float>::kMinusInfinity) weight = 0;  // also where the row saw NaN
        s[0][n][e] = weight;
        dp[0][n][e] = weight * (dp[0][n][e] - r.delta);
        if (kCareful && weight == 0) dp[0][n][e] = 0;
      }
  }

  // The bit of element e of C tile n; of a query's word only that half, or quarter, which was written.
  __device__ __forceinline__ bool bit(const uint64_t* words, int n, int e) const {
    constexpr int kBits = Shape::kKeys < 32 ? Shape::kKeys : 32;
    using Word = std::conditional_t<kBits == 32, uint32_t, uint16_t>;
    const int moving = n * 8 + 2 * t + e % 2, staying = warp_row + g + e / 2 * 8;
    const int query = kKeysStay ? moving : staying;
    const int key = kKeysStay ? staying : moving, part = kKeysStay ? warp_row / kBits : n * 8 / kBits;
    return reinterpret_cast<const Word*>(words + query)[part] >> key % kBits & 1;
  }

  // The same with hidden pairs.
  __device__ __forceinline__ void finish_masked(Pairs& s, Pairs& dp, const float* rows, const PairBits& bits,
                                                bool careful) const {
#pragma unroll
    for (int n = 0; n < kMoving / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (!bit(bits.seen, n, e)) s[0][n][e] = Logits<float>::kMinusInfinity;
    if (careful) finish_open<true>(s, dp, rows);
    else finish_open<false>(s, dp, rows);
  }

  // visit(n, e, terms) for element e of C tile n, with all options. first_*: of the tile.
  template <class Visit>
  __device__ __forceinline__ void by_rules(const Pairs& s, const Pairs& dp, const float* rows, const PairBits& bits,
                                           const GradRules<T>& rules, int64_t first_query, int64_t first_key,
                                           const Visit& visit) const {
#pragma unroll
    for (int n = 0; n < kMoving / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int moving = n * 8 + 2 * t + e % 2, staying = warp_row + g + e / 2 * 8;
        const int64_t query = first_query + (kKeysStay ? moving : staying);
        const int64_t key = first_key + (kKeysStay ? staying : moving);
        GradTerms<float> terms{0, 0, 0};
        if (query < rules.p.queries && key < rules.p.keys)
          terms = rules.terms(query_row(rows, n, e), query, key, s[0][n][e], dp[0][n][e], bit(bits.seen, n, e),
                              !call.drops || bit(bits.kept, n, e));
        visit(n, e, terms);
        keep_order();
      }
    __syncwarp();  // the rules take lanes different ways, and what follows wants the whole warp
  }

  // The block's columns of a tile. (Whole columns of chunks that change places: see TileLayout.)
  static __device__ __forceinline__ TileFragments<kHead> columns_of(uint32_t tile) {
    return TileFragments<kHead>::rows_first(tile + first_column() * 2, 0);
  }
  __device__ __forceinline__ void add(const Pairs& weights, const Pairs& grads, uint32_t first_tile,
                                      uint32_t second_tile) {
    if constexpr (kKeysStay) add_values<T>(value_sums, weights, columns_of(second_tile));
    add_values<T>(score_sums, grads, columns_of(first_tile));
  }
  __device__ __forceinline__ void add_carefully(const Pairs& weights, const Pairs& grads, uint32_t first_tile,
                                                uint32_t second_tile) {
    if constexpr (kKeysStay) add_values_carefully<T>(value_sums, weights, columns_of(second_tile));
    add_values_carefully<T>(score_sums, grads, columns_of(first_tile));
  }

  // 0 * x is NaN for inf and NaN.
  __device__ __forceinline__ bool sums_are_finite() const {
    float probe = 0;
#pragma unroll
    for (int n = 0; n < Shape::kColumns / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        probe = __fmaf_rn(score_sums[0][n][e], 0.0f, probe);
        if constexpr (kKeysStay) probe = __fmaf_rn(value_sums[0][n][e], 0.0f, probe);
      }
    return probe == 0;
  }
};

}  // namespace mha::cuda
