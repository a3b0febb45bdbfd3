// Transposes of square blocks held in registers, AVX-512: first within the 16-byte quarters of a register, then the
// quarters among themselves. Only moves bits, so that registers may as well hold pairs of bfloat16.

// q[0..3] hold, quarter by quarter, what output registers 0, 1, 2, 3 need from source rows 0-3; q[4..7] from rows 4-7
// and so on: the 4x4 transpose of quarters.
MHA_INLINE void transpose_quarters(__m512& a, __m512& b, __m512& c, __m512& d) {
  const __m512 ab_even = _mm512_shuffle_f32x4(a, b, 0x88), ab_odd = _mm512_shuffle_f32x4(a, b, 0xDD);
  const __m512 cd_even = _mm512_shuffle_f32x4(c, d, 0x88), cd_odd = _mm512_shuffle_f32x4(c, d, 0xDD);
  a = _mm512_shuffle_f32x4(ab_even, cd_even, 0x88);
  b = _mm512_shuffle_f32x4(ab_odd, cd_odd, 0x88);
  c = _mm512_shuffle_f32x4(ab_even, cd_even, 0xDD);
  d = _mm512_shuffle_f32x4(ab_odd, cd_odd, 0xDD);
}

MHA_INLINE void transpose(FloatVec (&r)[16]) {
  __m512 pairs[16], quads[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    pairs[2 * i] = _mm512_unpacklo_ps((__m512)r[2 * i], (__m512)r[2 * i + 1]);
    pairs[2 * i + 1] = _mm512_unpackhi_ps((__m512)r[2 * i], (__m512)r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {  // quads[i + c]: rows i..i+3 of columns c, c + 4, c + 8, c + 12, one per quarter
    quads[i] = _mm512_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
    quads[i + 1] = _mm512_shuffle_ps(pairs[i], pairs[i + 2], 0xEE);
    quads[i + 2] = _mm512_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
    quads[i + 3] = _mm512_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xEE);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    transpose_quarters(quads[c], quads[c + 4], quads[c + 8], quads[c + 12]);
    r[c] = (FloatVec)quads[c];
    r[c + 4] = (FloatVec)quads[c + 4];
    r[c + 8] = (FloatVec)quads[c + 8];
    r[c + 12] = (FloatVec)quads[c + 12];
  }
}

MHA_INLINE void transpose(DoubleVec (&r)[8]) {
  __m512 pairs[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // pairs[2i + c]: rows 2i, 2i+1 of columns c, c + 2, c + 4, c + 6
    pairs[2 * i] = (__m512)_mm512_unpacklo_pd((__m512d)r[2 * i], (__m512d)r[2 * i + 1]);
    pairs[2 * i + 1] = (__m512)_mm512_unpackhi_pd((__m512d)r[2 * i], (__m512d)r[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int c = 0; c < 2; ++c) {
    transpose_quarters(pairs[c], pairs[c + 2], pairs[c + 4], pairs[c + 6]);
    r[c] = (DoubleVec)pairs[c];
    r[c + 2] = (DoubleVec)pairs[c + 2];
    r[c + 4] = (DoubleVec)pairs[c + 4];
    r[c + 6] = (DoubleVec)pairs[c + 6];
  }
}

// Lane i: the sum of the lanes of r[i]. Half the operations of a transpose: every step adds up what it has moved.
// quarter_sums: quarter 0 is the sum of the quarters of a, quarter 1 that of b, and so on.
template <class V>
MHA_INLINE V quarter_sums(V a, V b, V c, V d) {
  const V ab =
      (V)_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0x88) + (V)_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0xDD);
  const V cd =
      (V)_mm512_shuffle_f32x4((__m512)c, (__m512)d, 0x88) + (V)_mm512_shuffle_f32x4((__m512)c, (__m512)d, 0xDD);
  return (V)_mm512_shuffle_f32x4((__m512)ab, (__m512)cd, 0x88) + (V)_mm512_shuffle_f32x4((__m512)ab, (__m512)cd, 0xDD);
}

MHA_INLINE FloatVec lane_sums(FloatVec (&r)[16]) {
  __m512 pairs[8];
  FloatVec quads[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const __m512 a = (__m512)r[2 * i], b = (__m512)r[2 * i + 1];
    pairs[i] = _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d a = (__m512d)pairs[2 * i], b = (__m512d)pairs[2 * i + 1];
    quads[i] = (FloatVec)_mm512_unpacklo_pd(a, b) + (FloatVec)_mm512_unpackhi_pd(a, b);
  }
  return quarter_sums(quads[0], quads[1], quads[2], quads[3]);
}

MHA_INLINE DoubleVec lane_sums(DoubleVec (&r)[8]) {
  DoubleVec pairs[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d a = (__m512d)r[2 * i], b = (__m512d)r[2 * i + 1];
    pairs[i] = (DoubleVec)_mm512_unpacklo_pd(a, b) + (DoubleVec)_mm512_unpackhi_pd(a, b);
  }
  return quarter_sums(pairs[0], pairs[1], pairs[2], pairs[3]);
}
