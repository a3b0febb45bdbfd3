// cvt: between integers, between integers and floats, between floats.
#include <cmath>
#include <limits>

#include "opcodes.h"

namespace ptxvm {
namespace {

struct Truncate {  // integer to integer: wraps
  template <class T>
  T operator()(T a) const {
    return a;
  }
};
template <class D>
struct SaturateTo {  // cvt.sat between integers
  template <class T>
  D operator()(T a) const {
    const __int128 low = std::numeric_limits<D>::min(), high = std::numeric_limits<D>::max(), value = a;
    return D(value < low ? low : value > high ? high : value);
  }
};

// Rounding of a float to an integer: nearest even, towards zero, down, up.
struct ToNearest {
  double operator()(double x) const { return std::nearbyint(x); }
};
struct ToZero {
  double operator()(double x) const { return std::trunc(x); }
};
struct Down {
  double operator()(double x) const { return std::floor(x); }
};
struct Up {
  double operator()(double x) const { return std::ceil(x); }
};

// Out of range: the nearest integer there is. NaN: 0, as the hardware gives for 32 bits and less.
template <class D, class Round>
struct ToInteger {
  template <class T>
  D operator()(T a) const {
    const double rounded = Round()(double(a));
    if (rounded != rounded) return sizeof(D) == 8 ? D(uint64_t(1) << 63) : D(0);
    const double limit = std::ldexp(1.0, 8 * sizeof(D) - std::is_signed_v<D>);
    if (rounded >= limit) return std::numeric_limits<D>::max();
    if (rounded < double(std::numeric_limits<D>::min())) return std::numeric_limits<D>::min();
    return D(rounded);
  }
};
template <class D>
struct RoundFloat {
  template <class T>
  T operator()(T a) const {
    return T(D()(double(a)));
  }
};
template <class D>
struct ToFloat {  // rounds once: from a 64-bit integer to a 16-bit format through the exact double or float is close
                  // enough
  template <class T>
  D operator()(T a) const {
    if constexpr (std::is_same_v<D, Half> || std::is_same_v<D, BFloat16>) {
      return D(float(a));
    } else {
      return D(a);
    }
  }
};
// To float towards zero, down or up (cvt.rz.f32.f64, cvt.rz.f32.s32).
enum class Direction { zero, down, up };
template <Direction direction>
struct ToFloatDirected {
  template <class T>
  float operator()(T a) const {
    const float nearest = float(a);
    const long double exact = a, rounded = nearest;
    const bool down = direction == Direction::down || (direction == Direction::zero && exact > 0);
    if (down && rounded > exact) return std::nextafter(nearest, -INFINITY);
    if (!down && rounded < exact) return std::nextafter(nearest, INFINITY);
    return nearest;
  }
};
// The first operand goes to the high half.
template <class T>
struct Pack {
  Pair<T> operator()(float high, float low) const { return {T(low), T(high)}; }
};
// Nearest with ties away from zero at the 10 bits of tf32.
struct ToTf32 {
  uint32_t operator()(float a) const {
    const uint32_t bits = bits_as<uint32_t>(a);
    return a - a != 0 ? bits : (bits + 0x1000u) & 0xFFFFE000u;  // infinity and NaN stay
  }
};
struct Relu {
  float operator()(float a) const { return a > 0 ? a : 0.f; }
};
template <class T>
struct PackRelu {
  Pair<T> operator()(float high, float low) const { return {T(Relu()(low)), T(Relu()(high))}; }
};

template <class D, class A>
void define_integer_pair(OpcodeTable& table) {
  const std::string types = std::string(suffix<D>()) + "." + suffix<A>();
  define<Truncate, D, A>(table, "cvt." + types);
  if constexpr (sizeof(A) >= 4) define_rare<SaturateTo<D>, D, A>(table, "cvt.sat." + types);
}
template <class D, class... A>
void define_integers_to(OpcodeTable& table) {
  (define_integer_pair<D, A>(table), ...);
}
template <class... T>
void define_integers(OpcodeTable& table) {
  (define_integers_to<T, T...>(table), ...);
}

template <class F, class I>
void define_float_and_integer(OpcodeTable& table) {
  const std::string from_float = std::string(suffix<I>()) + "." + suffix<F>();
  const std::string to_float = std::string(suffix<F>()) + "." + suffix<I>();
  define_rare<ToInteger<I, ToNearest>, I, F>(table, "cvt.rni." + from_float);
  define_rare<ToInteger<I, ToZero>, I, F>(table, "cvt.rzi." + from_float);
  define_rare<ToInteger<I, Down>, I, F>(table, "cvt.rmi." + from_float);
  define_rare<ToInteger<I, Up>, I, F>(table, "cvt.rpi." + from_float);
  define_rare<ToFloat<F>, F, I>(table, "cvt." + to_float);
  if constexpr (std::is_same_v<F, float>) {
    define_rare<ToFloatDirected<Direction::zero>, F, I>(table, "cvt.rz." + to_float);
    define_rare<ToFloatDirected<Direction::down>, F, I>(table, "cvt.rm." + to_float);
    define_rare<ToFloatDirected<Direction::up>, F, I>(table, "cvt.rp." + to_float);
  }
}
template <class F, class... I>
void define_float_and_integers(OpcodeTable& table) {
  (define_float_and_integer<F, I>(table), ...);
}

template <class F>
void define_rounding(OpcodeTable& table) {
  const std::string types = std::string(suffix<F>()) + "." + suffix<F>();
  define_rare<RoundFloat<ToNearest>, F, F>(table, "cvt.rni." + types);
  define_rare<RoundFloat<ToZero>, F, F>(table, "cvt.rzi." + types);
  define_rare<RoundFloat<Down>, F, F>(table, "cvt.rmi." + types);
  define_rare<RoundFloat<Up>, F, F>(table, "cvt.rpi." + types);
}

}  // namespace

void add_integer_conversions(OpcodeTable& table) {
  define_integers<int8_t, uint8_t, int16_t, uint16_t, int32_t, uint32_t, int64_t, uint64_t>(table);
}

void add_float_conversions(OpcodeTable& table) {
  define_float_and_integers<float, int8_t, uint8_t, int16_t, uint16_t, int32_t, uint32_t, int64_t, uint64_t>(table);
  define_float_and_integers<double, int8_t, uint8_t, int16_t, uint16_t, int32_t, uint32_t, int64_t, uint64_t>(table);
  define_float_and_integers<Half, int16_t, uint16_t, int32_t, uint32_t, int64_t, uint64_t>(table);
  define_float_and_integers<BFloat16, int16_t, uint16_t, int32_t, uint32_t, int64_t, uint64_t>(table);
  // Those of inner loops.
  define<ToFloat<float>, float, int32_t>(table, "cvt.f32.s32");
  define<ToFloat<float>, float, uint32_t>(table, "cvt.f32.u32");
  define<ToInteger<int32_t, ToZero>, int32_t, float>(table, "cvt.rzi.s32.f32");
  define_rounding<float>(table), define_rounding<double>(table), define_rounding<Half>(table);

  define<ToFloat<double>, double, float>(table, "cvt.f64.f32");
  define<ToFloat<float>, float, double>(table, "cvt.f32.f64");
  define_rare<ToFloatDirected<Direction::zero>, float, double>(table, "cvt.rz.f32.f64");
  define_rare<ToFloatDirected<Direction::down>, float, double>(table, "cvt.rm.f32.f64");
  define_rare<ToFloatDirected<Direction::up>, float, double>(table, "cvt.rp.f32.f64");
  define<ToFloat<float>, float, float>(table, "cvt.f32.f32");
  define<ToFloat<Half>, Half, float>(table, "cvt.f16.f32");
  define<ToFloat<Half>, Half, double>(table, "cvt.f16.f64");
  define<ToFloat<BFloat16>, BFloat16, float>(table, "cvt.bf16.f32");
  define<ToFloat<BFloat16>, BFloat16, double>(table, "cvt.bf16.f64");
  define<ToFloat<float>, float, Half>(table, "cvt.f32.f16");
  define<ToFloat<double>, double, Half>(table, "cvt.f64.f16");
  define<ToFloat<float>, float, BFloat16>(table, "cvt.f32.bf16");
  define<ToFloat<double>, double, BFloat16>(table, "cvt.f64.bf16");
  define<Pack<Half>, Pair<Half>, float, float>(table, "cvt.f16x2.f32");
  define<Pack<BFloat16>, Pair<BFloat16>, float, float>(table, "cvt.bf16x2.f32");
  define<PackRelu<Half>, Pair<Half>, float, float>(table, "cvt.relu.f16x2.f32");
  define<PackRelu<BFloat16>, Pair<BFloat16>, float, float>(table, "cvt.relu.bf16x2.f32");
  define<ToTf32, uint32_t, float>(table, "cvt.rna.tf32.f32");
}

}  // namespace ptxvm
