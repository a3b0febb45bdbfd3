// Integer arithmetic.
#include <type_traits>

#include "opcodes.h"

namespace ptxvm {
namespace {

// Compiled with -fwrapv: signed overflow wraps as in PTX.
struct Add {
  template <class T>
  T operator()(T a, T b) const {
    return T(a + b);
  }
};
struct Sub {
  template <class T>
  T operator()(T a, T b) const {
    return T(a - b);
  }
};
struct MulLow {
  template <class T>
  T operator()(T a, T b) const {
    return T(std::make_unsigned_t<T>(a) * uint64_t(std::make_unsigned_t<T>(b)));
  }
};
// Division by zero gives all ones, as on the hardware (PTX leaves it open); the one quotient that overflows wraps.
struct Div {
  template <class T>
  T operator()(T a, T b) const {
    if (b == 0) return T(-1);
    if (std::is_signed_v<T> && b == T(-1)) return T(0 - a);
    return T(a / b);
  }
};
struct Rem {
  template <class T>
  T operator()(T a, T b) const {
    if (b == 0) return a;
    if (std::is_signed_v<T> && b == T(-1)) return 0;
    return T(a % b);
  }
};
struct Min {
  template <class T>
  T operator()(T a, T b) const {
    return a < b ? a : b;
  }
};
struct Max {
  template <class T>
  T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};
struct Neg {
  template <class T>
  T operator()(T a) const {
    return T(-a);
  }
};
struct Abs {
  template <class T>
  T operator()(T a) const {
    return T(a < 0 ? -a : a);
  }
};

// The type that holds a product of two T.
template <class T>
struct wide;
template <>
struct wide<int16_t> {
  using type = int32_t;
};
template <>
struct wide<uint16_t> {
  using type = uint32_t;
};
template <>
struct wide<int32_t> {
  using type = int64_t;
};
template <>
struct wide<uint32_t> {
  using type = uint64_t;
};
template <>
struct wide<int64_t> {
  using type = __int128;
};
template <>
struct wide<uint64_t> {
  using type = unsigned __int128;
};
template <class T>
using wide_t = typename wide<T>::type;

struct MulWide {
  template <class T>
  wide_t<T> operator()(T a, T b) const {
    return wide_t<T>(a) * b;
  }
};
struct MulHigh {
  template <class T>
  T operator()(T a, T b) const {
    return T((wide_t<T>(a) * b) >> (8 * sizeof(T)));
  }
};
struct MadLow {
  template <class T>
  T operator()(T a, T b, T c) const {
    return T(MulLow()(a, b) + c);
  }
};
struct MadHigh {
  template <class T>
  T operator()(T a, T b, T c) const {
    return T(MulHigh()(a, b) + c);
  }
};
struct MadWide {
  template <class T>
  wide_t<T> operator()(T a, T b, wide_t<T> c) const {
    return MulWide()(a, b) + c;
  }
};
struct AbsoluteDifference {
  template <class T>
  T operator()(T a, T b, T c) const {
    return T(c + (a < b ? b - a : a - b));
  }
};

template <class... T>
void define_wide(OpcodeTable& table) {
  (define<MulWide, wide_t<T>, T, T>(table, std::string("mul.wide.") + suffix<T>()), ...);
  (define<MadWide, wide_t<T>, T, T, wide_t<T>>(table, std::string("mad.wide.") + suffix<T>()), ...);
}

template <class... T>
void define_for(OpcodeTable& table) {
  define_binary<Add, T...>(table, "add");
  define_binary<Sub, T...>(table, "sub");
  define_binary<MulLow, T...>(table, "mul.lo");
  define_binary<MulHigh, T...>(table, "mul.hi");
  define_binary<Div, T...>(table, "div");
  define_binary<Rem, T...>(table, "rem");
  define_binary<Min, T...>(table, "min");
  define_binary<Max, T...>(table, "max");
  define_ternary<MadLow, T...>(table, "mad.lo");
  define_ternary<MadHigh, T...>(table, "mad.hi");
  define_ternary<AbsoluteDifference, T...>(table, "sad");
}

}  // namespace

void add_integer_arithmetic(OpcodeTable& table) {
  define_for<int16_t, uint16_t, int32_t, uint32_t, int64_t, uint64_t>(table);
  define_wide<int16_t, uint16_t, int32_t, uint32_t>(table);
  define_unary<Neg, int16_t, int32_t, int64_t>(table, "neg");
  define_unary<Abs, int16_t, int32_t, int64_t>(table, "abs");
}

}  // namespace ptxvm
