// core/half.h: every 16-bit value there and back, and rounding against an independent rule: of the two neighbouring
// values the nearer one, of two equally near ones the even one.
#include <cmath>
#include <cstdint>

#include "../../csrc/core/half.h"
#include "check.h"

using namespace mha;

namespace {

double bfloat16_value(uint32_t bits) {
  const int exponent = bits >> 7 & 0xFF, fraction = bits & 0x7F;
  const double magnitude = exponent ? std::ldexp(128 + fraction, exponent - 134) : std::ldexp(fraction, -133);
  return bits & 0x8000 ? -magnitude : magnitude;
}

double float16_value(uint32_t bits) {
  const int exponent = bits >> 10 & 0x1F, fraction = bits & 0x3FF;
  const double magnitude = exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
  return bits & 0x8000 ? -magnitude : magnitude;
}

struct Format {
  const char* name;
  uint32_t infinity;  // bits; above them NaN
  double (*value)(uint32_t);
  float (*widened)(uint32_t);
  uint32_t (*narrowed)(float);
};

const Format kFormats[] = {
    {"bfloat16", 0x7F80, bfloat16_value, [](uint32_t b) { return widen(bfloat16{static_cast<uint16_t>(b)}); },
     [](float x) { return uint32_t{narrow<bfloat16>(x).bits}; }},
    {"float16", 0x7C00, float16_value, [](uint32_t b) { return widen(float16{static_cast<uint16_t>(b)}); },
     [](float x) { return uint32_t{narrow<float16>(x).bits}; }}};

// Magnitudes are ordered as their bits are, and the value after the largest finite one stands for infinity.
uint32_t nearest(const Format& f, float x) {
  const uint32_t sign = std::signbit(x) ? 0x8000 : 0;
  const double magnitude = std::fabs(static_cast<double>(x));
  uint32_t low = 0, high = f.infinity;
  if (magnitude >= f.value(high)) return sign | high;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (f.value(middle) <= magnitude ? low : high) = middle;
  }
  const double below = magnitude - f.value(low), above = f.value(high) - magnitude;
  return sign | (below < above || (below == above && low % 2 == 0) ? low : high);
}

void check_all_values(const Format& f) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const uint32_t magnitude = bits & 0x7FFF;
    const float x = f.widened(bits);
    if (magnitude > f.infinity) {
      CHECK(std::isnan(x) && std::isnan(f.widened(f.narrowed(x))), "%s %04x", f.name, bits);
      continue;
    }
    const double expected = magnitude == f.infinity ? std::copysign(INFINITY, f.value(bits)) : f.value(bits);
    CHECK(x == expected && std::signbit(x) == (bits >> 15), "%s %04x is %g, got %g", f.name, bits, expected, x);
    CHECK(f.narrowed(x) == bits, "%s %04x came back as %04x", f.name, bits, f.narrowed(x));
  }
}

void check_rounding(const Format& f) {
  test::Random random;
  const auto check = [&](float x) {
    if (std::isnan(x)) CHECK(std::isnan(f.widened(f.narrowed(x))), "%s NaN %08x", f.name, float_bits(x));
    else CHECK(f.narrowed(x) == nearest(f, x), "%s of %a: %04x, not %04x", f.name, x, f.narrowed(x), nearest(f, x));
  };
  for (int i = 0; i < 300000; ++i) check(float_from_bits(static_cast<uint32_t>(random.bits())));
  // Values of the format, the midpoints between them, and the floats next to both.
  for (uint32_t bits = 0; bits < f.infinity; ++bits) {
    const double middle = (f.value(bits) + f.value(bits + 1)) / 2;
    for (float x : {static_cast<float>(f.value(bits)), static_cast<float>(middle)})
      for (float y : {x, std::nextafter(x, 0.f), std::nextafter(x, INFINITY)}) check(y), check(-y);
  }
}

}  // namespace

int main() {
  for (const Format& f : kFormats) check_all_values(f), check_rounding(f);
  return test::summary("half");
}
