// O += P V for a tile of keys, from weights in registers; and the same where values are not finite.
#pragma once
#include "fused_tiles.cuh"

namespace mha::cuda {

// Tile C of weights, narrowed: the 16 keys of step `s` as A.
template <class T, int kKeyTiles>
MHA_DEVICE void weights_of_step(uint32_t (&a)[4], const float (&weights)[kKeyTiles][4], int s) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float (&two)[4] = weights[2 * s + e / 2];
    a[e] = pack<T>(two[e % 2 * 2], two[e % 2 * 2 + 1]);
  }
}

// The columns of `values` from the first on, as many as the output has.
template <class T, int kRowTiles, int kKeyTiles, int kColumnTiles, int kHead>
MHA_DEVICE void add_values(float (&output)[kRowTiles][kColumnTiles][4], const float (&weights)[kRowTiles][kKeyTiles][4],
                           const TileFragments<kHead>& values) {
#pragma unroll
  for (int s = 0; s < kKeyTiles / 2; ++s) {
    uint32_t a[kRowTiles][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) weights_of_step<T>(a[m], weights[m], s);
#pragma unroll
    for (int n = 0; n < kColumnTiles / 2; ++n) {
      uint32_t b[4];
      load_matrices_transposed(b, values.at(s, n));
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        mma<T>(output[m][2 * n], a[m], b[0], b[1]);
        mma<T>(output[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// "Zero hides" (docs/notation.md): a weight of 0 contributes nothing, but 0 * NaN is NaN. So values that are not finite
// count as 0 in the product, whose bits are then those for zeros in their place, and a second product, of "the weight
// is not 0" with a code of what the value is, says what is to be added. The codes are powers of two far enough apart
// for the sums over up to 64 keys to tell how many of each there were, and exact.
template <class T>
struct Unbounded;
template <>
struct Unbounded<bfloat16> {
  static constexpr uint32_t kExponent = 0x7F80, kOne = 0x3F80, kPlus = kOne, kMinus = 0x4300, kNaN = 0x4680;
};
template <>
struct Unbounded<float16> {
  static constexpr uint32_t kExponent = 0x7C00, kOne = 0x3C00, kPlus = kOne, kMinus = 0x5800, kNaN = 0x7400;
};
constexpr int kMinusCode = 128, kNaNCode = 16384;  // kPlus, kMinus and kNaN as numbers: 1, 128, 16384

// Takes what is not finite out of a pair of values and returns its codes.
template <class T>
MHA_DEVICE uint32_t take_unbounded(uint32_t& pair) {
  using U = Unbounded<T>;
  uint32_t codes = 0, finite = pair;
#pragma unroll
  for (int shift = 0; shift < 32; shift += 16) {
    const uint32_t x = pair >> shift & 0xFFFFu, magnitude = x & 0x7FFFu;
    if (magnitude < U::kExponent) continue;
    finite &= ~(0xFFFFu << shift);
    codes |= (magnitude > U::kExponent ? U::kNaN : x != magnitude ? U::kMinus : U::kPlus) << shift;
  }
  pair = finite;
  return codes;
}

// Adds what a sum of codes stands for. No code, and the bits of x stay: -0 + 0 would be 0.
MHA_DEVICE void add_unbounded(float& x, float codes) {
  const int n = static_cast<int>(codes);
  if (n >= kNaNCode) x = __int_as_float(0x7FFFFFFF);
  if (n % kMinusCode != 0) x += __int_as_float(0x7F800000);
  if (n / kMinusCode % kMinusCode != 0) x += __int_as_float(0xFF800000);
}

// add_values() by that rule, each sum in the same order. The columns are taken eight at a time in a loop that is not
// unrolled: a slow way should not need more registers than the fast one. So the output, which registers hold, is not
// indexed but searched.
template <class T, int kRowTiles, int kKeyTiles, int kColumnTiles, int kHead>
MHA_DEVICE void add_values_carefully(float (&output)[kRowTiles][kColumnTiles][4],
                                     const float (&weights)[kRowTiles][kKeyTiles][4],
                                     const TileFragments<kHead>& values) {
  constexpr uint32_t kOne = Unbounded<T>::kOne;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    uint32_t a[kKeyTiles / 2][4], nonzero[kKeyTiles / 2][4];
#pragma unroll
    for (int s = 0; s < kKeyTiles / 2; ++s) {
      weights_of_step<T>(a[s], weights[m], s);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float (&two)[4] = weights[m][2 * s + e / 2];
        nonzero[s][e] = (two[e % 2 * 2] != 0 ? kOne : 0) | (two[e % 2 * 2 + 1] != 0 ? kOne << 16 : 0);
      }
    }
#pragma unroll 1
    for (int n = 0; n < kColumnTiles; ++n) {
      float sum[4] = {}, codes[4] = {};
#pragma unroll
      for (int i = 0; i < kColumnTiles; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (i == n) sum[e] = output[m][i][e];
#pragma unroll
      for (int s = 0; s < kKeyTiles / 2; ++s) {
        uint32_t b[4];
        load_matrices_transposed(b, values.at(s, n / 2));
        uint32_t low = n % 2 ? b[2] : b[0], high = n % 2 ? b[3] : b[1];
        const uint32_t low_code = take_unbounded<T>(low), high_code = take_unbounded<T>(high);
        mma<T>(sum, a[s], low, high);
        mma<T>(codes, nonzero[s], low_code, high_code);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) add_unbounded(sum[e], codes[e]);
#pragma unroll
      for (int i = 0; i < kColumnTiles; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (i == n) output[m][i][e] = sum[e];
    }
  }
}

}  // namespace mha::cuda
