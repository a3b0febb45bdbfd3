// e^x for x <= 0, tanh and its slope, for one register of float or double. One reduction and one polynomial serve all
// three, the same on every level: x = n ln 2 + r with |r| <= ln 2 / 2, and then
//   e^x     = 2^n (1 + q),            q = e^r - 1 = r + r^2 P(r)
//   e^x - 1 = 2^n q + (2^n - 1).
// P is the minimax polynomial of (e^r - 1 - r) / r^2 in the error relative to e^r (Remez exchange in 60 digits).
// Largest errors, held by tests/cpp/test_exp.cpp: e^x 1.1 ulp, tanh 2.6 ulp, its slope 4.5 ulp.

template <class T>
struct ExpConstants;

template <>
struct ExpConstants<float> {
  // e^lowest is just a normal number. Anything below is returned as 0, which keeps subnormals (and the hundred-cycle
  // traps of arithmetic on them) out of the softmax.
  static constexpr float lowest = -87.0f;
  static constexpr float log2e = 0x1.715476p+0f;
  // ln 2 in two parts; the high one is short, so that n * ln2_high is exact.
  static constexpr float ln2_high = 0x1.63p-1f, ln2_low = -0x1.bd0106p-13f;
  // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
  static constexpr float round_magic = 0x1.8p23f;
  static constexpr int32_t mantissa_bits = 23, one = 0x3F800000, sign = INT32_MIN;
  static constexpr int degree = 4;  // largest error of the polynomial 0.06 units of 2^-24
  static constexpr float p[] = {0.49999994f, 0.166665211f, 0.041668389f, 0.00836871658f, 0.00138146093f};
};

template <>
struct ExpConstants<double> {
  static constexpr double lowest = -708.0;
  static constexpr double log2e = 0x1.71547652b82fep+0;
  static constexpr double ln2_high = 0x1.62e42feep-1, ln2_low = 0x1.a39ef35793c76p-33;
  static constexpr double round_magic = 0x1.8p52;
  static constexpr int64_t mantissa_bits = 52, one = 0x3FF0000000000000, sign = INT64_MIN;
  static constexpr int degree = 9;  // largest error of the polynomial 0.1 units of 2^-53
  static constexpr double p[] = {0.5000000000000011,     0.16666666666666413,    0.041666666666530155,
                                 0.008333333333494466,   0.0013888888943630372,  0.0001984126950657235,
                                 2.4801493098632217e-05, 2.7557586378063306e-06, 2.763024847658922e-07,
                                 2.5000060571192997e-08};
};

// e^x = power (1 + q), power = 2^n; for lowest <= x <= 0, and NaN gives NaN.
template <class T>
struct ExpParts {
  Vec<T> power, q;
};

template <class T>
MHA_INLINE ExpParts<T> exp_parts(Vec<T> x) {
  using C = ExpConstants<T>;
  const Vec<T> rounded = mul_add(x, splat<T>(C::log2e), splat<T>(C::round_magic));
  const Vec<T> n = rounded - C::round_magic;
  const Vec<T> r = mul_add(n, splat<T>(-C::ln2_low), mul_add(n, splat<T>(-C::ln2_high), x));
  Vec<T> poly = splat<T>(C::p[C::degree]);
#pragma GCC unroll 16
  for (int k = C::degree - 1; k >= 0; --k) poly = mul_add(poly, r, splat<T>(C::p[k]));
  // The low bits of `rounded` hold n; shifted into the exponent field they multiply 1.0 by 2^n.
  const VecMask<T> power = ((VecMask<T>)rounded << C::mantissa_bits) + C::one;
  return {(Vec<T>)power, mul_add(r * r, poly, r)};
}

// max(x, low) that lets a NaN through: vec_max returns its second argument when it cannot compare.
template <class T>
MHA_INLINE Vec<T> at_least(T low, Vec<T> x) {
  return vec_max(splat<T>(low), x);
}

// e^x, x <= 0 or NaN.
template <class T>
MHA_INLINE Vec<T> exp_nonpositive(Vec<T> x) {
  constexpr T lowest = ExpConstants<T>::lowest;
  const ExpParts<T> e = exp_parts<T>(at_least<T>(lowest, x));
  return select<T>(x < lowest, Vec<T>{}, (1 + e.q) * e.power);  // not q power + power: q power may be subnormal
}

// The same bits as one lane of the above.
template <class T>
MHA_INLINE T exp_nonpositive_scalar(T x) {
  return exp_nonpositive<T>(splat<T>(x))[0];
}

template <class T>
MHA_INLINE Vec<T> minus_twice_magnitude(Vec<T> y) {
  return -2 * (Vec<T>)((VecMask<T>)y & ~ExpConstants<T>::sign);
}

// tanh|y| = -m / (2 + m) with m = e^(-2|y|) - 1, which cancels nowhere and is -1 in either type from e^-40 on.
template <class T>
MHA_INLINE Vec<T> vec_tanh(Vec<T> y) {
  const ExpParts<T> e = exp_parts<T>(at_least<T>(-40, minus_twice_magnitude<T>(y)));
  const Vec<T> m = mul_add(e.q, e.power, e.power - 1);
  const Vec<T> magnitude = -m / (2 + m);
  return (Vec<T>)(((VecMask<T>)magnitude & ~ExpConstants<T>::sign) | ((VecMask<T>)y & ExpConstants<T>::sign));
}

// 1 - tanh(y)^2 = 4 e / (1 + e)^2 with e = e^(-2|y|): right where 1 - tanh^2 would cancel.
template <class T>
MHA_INLINE Vec<T> tanh_slope(Vec<T> y) {
  const Vec<T> e = exp_nonpositive<T>(minus_twice_magnitude<T>(y));
  return 4 * e / ((1 + e) * (1 + e));
}

// Weights from exponentials: e times `factor`, the inverse of their sum. Where that is NaN the row has seen NaN, but
// keys without weight, hidden ones among them, still have none.
template <class Acc>
struct Normalizer {
  Vec<Acc> factor;
  bool regular;  // no NaN in it

  static Normalizer of(Vec<Acc> factor) { return {factor, lane_sum<Acc>(factor * 0) == 0}; }

  MHA_INLINE_MEMBER Vec<Acc> operator()(Vec<Acc> e) const {
    return regular ? e * factor : select<Acc>(e == 0, Vec<Acc>{}, e * factor);
  }
};
