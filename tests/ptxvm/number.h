// The number formats of PTX that C++17 lacks, and reinterpretation of bits. Arithmetic on 16-bit formats is done in
// float (or double) and rounded once.
#pragma once
#include <cstdint>
#include <cstring>

namespace ptxvm {

template <class To, class From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "a reinterpretation keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline float half_to_float(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, magnitude = h & 0x7FFFu;
  // Multiplying by 2^112 moves the exponent's bias from 15 to 127, for subnormals too.
  const uint32_t finite = bits_as<uint32_t>(bits_as<float>(magnitude << 13) * 0x1p112f);
  const uint32_t special = 0x7F800000u | (magnitude & 0x3FFu) << 13;
  return bits_as<float>(sign | (magnitude >= 0x7C00u ? special : finite));
}

// Round to nearest even. A NaN becomes PTX's canonical one.
inline uint16_t float_to_half(float x) {
  const uint32_t bits = bits_as<uint32_t>(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return 0x7FFF;
  if (magnitude >= 0x477FF000u) return uint16_t(sign | 0x7C00u);  // 65520 and more round to infinity
  if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 lets float's own rounding leave the result in the low bits
    return uint16_t(sign | (bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - bits_as<uint32_t>(0.5f)));
  }
  return uint16_t(sign | (((magnitude + 0xFFFu + (magnitude >> 13 & 1u)) >> 13) - (112u << 10)));
}

inline float bfloat16_to_float(uint16_t h) { return bits_as<float>(uint32_t(h) << 16); }

inline uint16_t float_to_bfloat16(float x) {
  if (x != x) return 0x7FFF;
  const uint32_t bits = bits_as<uint32_t>(x);
  return uint16_t((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

struct Half {
  uint16_t bits;
  Half() = default;
  explicit Half(float x) : bits(float_to_half(x)) {}
  operator float() const { return half_to_float(bits); }
};

struct BFloat16 {
  uint16_t bits;
  BFloat16() = default;
  explicit BFloat16(float x) : bits(float_to_bfloat16(x)) {}
  operator float() const { return bfloat16_to_float(bits); }
};

// Two 16-bit numbers in one 32-bit register: f16x2, bf16x2. The first is in the low half.
template <class T>
struct Pair {
  T low, high;
};

}  // namespace ptxvm
