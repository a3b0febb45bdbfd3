// Floating point arithmetic. What the hardware approximates (ex2, lg2, rcp, rsqrt, sqrt, tanh, sin, cos .approx) is
// computed as exactly as the host can; .ftz is ignored.
#include <cmath>

#include "opcodes.h"

namespace ptxvm {
namespace {

// Each functor works on float and double; Half and BFloat16 convert to float and the result is rounded once.
struct Add {
  template <class T>
  auto operator()(T a, T b) const {
    return a + b;
  }
};
struct Sub {
  template <class T>
  auto operator()(T a, T b) const {
    return a - b;
  }
};
struct Mul {
  template <class T>
  auto operator()(T a, T b) const {
    return a * b;
  }
};
struct Div {
  template <class T>
  auto operator()(T a, T b) const {
    return a / b;
  }
};
struct Fma {
  template <class T>
  auto operator()(T a, T b, T c) const {
    return std::fma(+a, +b, +c);
  }
};
// A NaN loses against a number, and -0 counts as less than +0.
struct Min {
  template <class T>
  T operator()(T a, T b) const {
    if (a != a) return b;
    if (a == b) return std::signbit(+a) ? a : b;
    return a > b ? b : a;
  }
};
struct Max {
  template <class T>
  T operator()(T a, T b) const {
    if (a != a) return b;
    if (a == b) return std::signbit(+a) ? b : a;
    return a < b ? b : a;
  }
};
// min.NaN, max.NaN: a NaN wins.
template <class Op>
struct KeepNan {
  template <class T>
  T operator()(T a, T b) const {
    return a != a || b != b ? T(NAN) : Op()(a, b);
  }
};
struct Neg {
  template <class T>
  auto operator()(T a) const {
    return -a;
  }
};
struct Abs {
  template <class T>
  auto operator()(T a) const {
    return std::fabs(+a);
  }
};
struct CopySign {
  template <class T>
  T operator()(T sign, T magnitude) const {
    return std::copysign(magnitude, sign);
  }
};
struct Sqrt {
  template <class T>
  auto operator()(T a) const {
    return std::sqrt(a);
  }
};
struct Rcp {
  template <class T>
  T operator()(T a) const {
    return T(1) / a;
  }
};
struct Rsqrt {
  template <class T>
  T operator()(T a) const {
    return T(1 / std::sqrt(double(a)));
  }
};
struct Ex2 {
  template <class T>
  auto operator()(T a) const {
    return std::exp2(+a);
  }
};
struct Lg2 {
  float operator()(float a) const { return std::log2(a); }
};
struct Tanh {
  template <class T>
  auto operator()(T a) const {
    return std::tanh(+a);
  }
};
struct Sin {
  float operator()(float a) const { return std::sin(a); }
};
struct Cos {
  float operator()(float a) const { return std::cos(a); }
};
struct Saturate {
  float operator()(float a) const { return a > 0 ? (a < 1 ? a : 1.f) : 0.f; }  // NaN becomes 0
};
template <class Op>
struct Saturated {
  float operator()(float a, float b) const { return Saturate()(Op()(a, b)); }
  float operator()(float a, float b, float c) const { return Saturate()(Op()(a, b, c)); }
};

// Rounding to zero (rz), down (rm) or up (rp): from the result in double, which holds sums and products of floats but
// for bits far below a float's last.
enum class Rounding { zero, down, up };
template <class Op, Rounding direction>
struct Directed {
  template <class... T>
  float operator()(T... a) const {
    const double exact = Op()(double(a)...);
    const float nearest = float(exact);
    const bool down = direction == Rounding::down || (direction == Rounding::zero && exact > 0);
    if (down && nearest > exact) return std::nextafter(nearest, -INFINITY);
    if (!down && nearest < exact) return std::nextafter(nearest, INFINITY);
    return nearest;
  }
};

// Both halves of f16x2 and bf16x2.
template <class Op>
struct Both {
  template <class T, class... Rest>
  Pair<T> operator()(Pair<T> a, Rest... b) const {
    return {T(Op()(a.low, b.low...)), T(Op()(a.high, b.high...))};
  }
};

template <class Op, int operands>
void define_packed(OpcodeTable& table, const std::string& name) {
  using H = Pair<Half>;
  using B = Pair<BFloat16>;
  if constexpr (operands == 1) define_unary<Both<Op>, H, B>(table, name);
  if constexpr (operands == 2) define_binary<Both<Op>, H, B>(table, name);
  if constexpr (operands == 3) define_ternary<Both<Op>, H, B>(table, name);
}

template <class Op, int operands>
void define_directed(OpcodeTable& table, const std::string& name) {
  const auto one = [&](auto op, const char* mode) {
    using D = decltype(op);
    if constexpr (operands == 2) define<D, float, float, float>(table, name + mode);
    if constexpr (operands == 3) define<D, float, float, float, float>(table, name + mode);
  };
  one(Directed<Op, Rounding::zero>(), ".rz.f32");
  one(Directed<Op, Rounding::down>(), ".rm.f32");
  one(Directed<Op, Rounding::up>(), ".rp.f32");
}

template <class Op, class... T>
void define_both_ways(OpcodeTable& table, const std::string& name) {
  define_binary<Op, T...>(table, name);
  define_binary<KeepNan<Op>, T...>(table, name + ".NaN");
}

}  // namespace

void add_float_arithmetic(OpcodeTable& table) {
  define_binary<Add, float, double, Half, BFloat16>(table, "add");
  define_binary<Sub, float, double, Half, BFloat16>(table, "sub");
  define_binary<Mul, float, double, Half, BFloat16>(table, "mul");
  define_binary<Div, float, double>(table, "div");
  define_ternary<Fma, float, double, Half, BFloat16>(table, "fma");
  define_ternary<Fma, float, double>(table, "mad");
  define_both_ways<Min, float, double, Half, BFloat16>(table, "min");
  define_both_ways<Max, float, double, Half, BFloat16>(table, "max");
  define_unary<Neg, float, double, Half, BFloat16>(table, "neg");
  define_unary<Abs, float, double, Half, BFloat16>(table, "abs");
  define_binary<CopySign, float, double>(table, "copysign");
  define_unary<Sqrt, float, double>(table, "sqrt");
  define_unary<Rcp, float, double>(table, "rcp");
  define_unary<Rsqrt, float, double>(table, "rsqrt");
  define_unary<Ex2, float, Half, BFloat16>(table, "ex2");
  define_unary<Lg2, float>(table, "lg2");
  define_unary<Tanh, float, Half, BFloat16>(table, "tanh");
  define_unary<Sin, float>(table, "sin");
  define_unary<Cos, float>(table, "cos");

  define_binary<Saturated<Add>, float>(table, "add.sat");
  define_binary<Saturated<Mul>, float>(table, "mul.sat");
  define_ternary<Saturated<Fma>, float>(table, "fma.sat");
  define<Saturate, float, float>(table, "cvt.sat.f32.f32");
  define_directed<Add, 2>(table, "add");
  define_directed<Sub, 2>(table, "sub");
  define_directed<Mul, 2>(table, "mul");
  define_directed<Div, 2>(table, "div");
  define_directed<Fma, 3>(table, "fma");

  define_packed<Add, 2>(table, "add");
  define_packed<Sub, 2>(table, "sub");
  define_packed<Mul, 2>(table, "mul");
  define_packed<Fma, 3>(table, "fma");
  define_packed<Min, 2>(table, "min");
  define_packed<Max, 2>(table, "max");
  define_packed<KeepNan<Min>, 2>(table, "min.NaN");
  define_packed<KeepNan<Max>, 2>(table, "max.NaN");
  define_packed<Neg, 1>(table, "neg");
  define_packed<Abs, 1>(table, "abs");
}

}  // namespace ptxvm
