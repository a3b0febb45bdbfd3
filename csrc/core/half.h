// The two 16-bit floating point formats as storage, and their conversion to and from float. Arithmetic is always done
// in float: these types hold bits.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "inline.h"

namespace mha {

struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

MHA_INLINE uint32_t float_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

MHA_INLINE float float_from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Type in which sums over elements of T are kept.
template <class T>
struct accumulate {
  using type = float;
};
template <>
struct accumulate<double> {
  using type = double;
};
template <class T>
using accumulate_t = typename accumulate<T>::type;

MHA_INLINE double widen(double x) { return x; }
MHA_INLINE float widen(float x) { return x; }
MHA_INLINE float widen(bfloat16 x) { return float_from_bits(uint32_t{x.bits} << 16); }

MHA_INLINE float widen(float16 x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16, magnitude = x.bits & 0x7FFFu;
  if (magnitude >= 0x7C00u) return float_from_bits(sign | 0x7F800000u | (magnitude & 0x3FFu) << 13);  // inf, NaN
  // Subnormals and normals at once: place the bits so that a multiplication by 2^112 rebiases the exponent.
  return float_from_bits(sign | float_bits(float_from_bits(magnitude << 13) * 0x1p112f));
}

// Round to nearest, ties to even, as torch does; NaN stays NaN.
MHA_INLINE bfloat16 narrow_to_bfloat16(float x) {
  const uint32_t bits = float_bits(x);
  if (x != x) return {static_cast<uint16_t>(bits >> 16 | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16)};
}

MHA_INLINE float16 narrow_to_float16(float x) {
  const uint32_t bits = float_bits(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return {static_cast<uint16_t>(sign | 0x7E00u)};   // NaN
  if (magnitude >= 0x477FF000u) return {static_cast<uint16_t>(sign | 0x7C00u)};  // rounds to 65536 or more: inf
  if (magnitude < 0x38800000u) {  // below 2^-14: float's own rounding at 0.5 leaves the subnormal in the low bits
    const float shifted = float_from_bits(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (float_bits(shifted) - float_bits(0.5f)))};
  }
  const uint32_t rounded = magnitude + 0xFFFu + (magnitude >> 13 & 1u);
  return {static_cast<uint16_t>(sign | ((rounded >> 13) - (112u << 10)))};
}

template <class T>
MHA_INLINE T narrow(accumulate_t<T> x) {
  if constexpr (std::is_same_v<T, bfloat16>) return narrow_to_bfloat16(x);
  else if constexpr (std::is_same_v<T, float16>) return narrow_to_float16(x);
  else return x;
}

}  // namespace mha
