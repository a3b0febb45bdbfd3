// e^(unit * d) for d <= 0, as 2^(c d) with c = unit * log2 e: the exponential of the fused kernels. Where exp.inl takes
// the last bit seriously, this takes half the instructions: 2^y = 2^n 2^f with n the nearest integer and f in
// [-1/2, 1/2], and 2^f the polynomial of least relative error (Remez exchange in 60 digits).

template <class T>
struct Exp2Constants;

// 16-bit weights: relative error 2.6e-6, a thousandth of bfloat16's rounding and a hundredth of float16's.
template <>
struct Exp2Constants<bfloat16> {
  static constexpr int degree = 4;
  static constexpr float p[] = {0.999999261f, 0.693121815f, 0.240247448f, 0.0559178603f, 0.00957010191f};
};
template <>
struct Exp2Constants<float16> : Exp2Constants<bfloat16> {};

template <>
struct Exp2Constants<float> {
  static constexpr int degree = 6;  // relative error 1.6e-8 with the coefficients as they are rounded here
  static constexpr float p[] = {1.0f,           0.693147206f,   0.240226469f,  0.0555032878f,
                                0.00961848896f, 0.00133999312f, 0.00015345812f};
};

template <>
struct Exp2Constants<double> {
  static constexpr int degree = 11;  // relative error 3.5e-17, likewise
  static constexpr double p[] = {1.0,
                                 0.69314718055994533,
                                 0.24022650695910156,
                                 0.055504108664819921,
                                 0.009618129107588335,
                                 0.0013333558146789953,
                                 0.00015403530462514668,
                                 1.5252733489958518e-5,
                                 1.3215433089567188e-6,
                                 1.0178198034320937e-7,
                                 7.074105630863179e-9,
                                 4.4352807904565084e-10};
};

template <class Acc>
struct Exp2Range;
template <>
struct Exp2Range<float> {
  static constexpr float lowest = -126;            // 2^lowest is the smallest normal number; below it counts as 0
  static constexpr float magic = 0x1.8p23f + 127;  // rounds to an integer, which stands biased in the low bits
  static constexpr int32_t mantissa_bits = 23;
};
template <>
struct Exp2Range<double> {
  static constexpr double lowest = -1022;
  static constexpr double magic = 0x1.8p52 + 1023;
  static constexpr int64_t mantissa_bits = 52;
};

template <class Acc>
struct Exponential {
  Acc c, lowest;  // of the exponent per unit of d, and of d: what is lower has exponential 0

  static Exponential of(double unit) {
    const double c = unit * 1.4426950408889634;
    return {static_cast<Acc>(c), to_finite<Acc>(Exp2Range<Acc>::lowest / c)};
  }

  // T says which polynomial. NaN gives NaN, -inf gives 0.
  template <class T>
  MHA_INLINE_MEMBER Vec<Acc> operator()(Vec<Acc> d) const {
    using P = Exp2Constants<T>;
    using R = Exp2Range<Acc>;
    const Vec<Acc> rounded = mul_add(d, splat<Acc>(c), splat<Acc>(R::magic));
    const Vec<Acc> f = mul_add(d, splat<Acc>(c), R::magic - rounded);
    Vec<Acc> power = splat<Acc>(P::p[P::degree]);
#pragma GCC unroll 16
    for (int k = P::degree - 1; k >= 0; --k) power = mul_add(power, f, splat<Acc>(P::p[k]));
    const VecMask<Acc> two_to_n = (VecMask<Acc>)rounded << R::mantissa_bits;
    return select<Acc>(d < lowest, Vec<Acc>{}, power * (Vec<Acc>)two_to_n);
  }
};

// What is subtracted from the scores of a row whose maximum this is. With nothing but -inf in the row any finite number
// does: every term is 0.
template <class Acc>
MHA_INLINE Vec<Acc> finite_shift(Vec<Acc> max) {
  return select<Acc>(max == -static_cast<Acc>(__builtin_inf()), Vec<Acc>{}, max);
}

// What turns exponentials into weights (keep_scale: dropout's); 0 in a row that sees nothing.
template <class Acc>
MHA_INLINE Vec<Acc> inverse_sum(Vec<Acc> sum, Acc keep_scale) {
  return select<Acc>(sum == 0, Vec<Acc>{}, keep_scale / sum);
}
