// Transposes of square blocks held in registers, AVX2: first within the 16-byte halves, then across them.

MHA_INLINE void transpose(FloatVec (&r)[8]) {
  __m256 pairs[8], quads[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    pairs[2 * i] = _mm256_unpacklo_ps((__m256)r[2 * i], (__m256)r[2 * i + 1]);
    pairs[2 * i + 1] = _mm256_unpackhi_ps((__m256)r[2 * i], (__m256)r[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {  // quads[i + c]: rows i..i+3 of columns c (low half) and c + 4 (high half)
    quads[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
    quads[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xEE);
    quads[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
    quads[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xEE);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = (FloatVec)_mm256_permute2f128_ps(quads[i], quads[i + 4], 0x20);
    r[i + 4] = (FloatVec)_mm256_permute2f128_ps(quads[i], quads[i + 4], 0x31);
  }
}

MHA_INLINE void transpose(DoubleVec (&r)[4]) {
  const __m256d low01 = _mm256_unpacklo_pd((__m256d)r[0], (__m256d)r[1]);
  const __m256d high01 = _mm256_unpackhi_pd((__m256d)r[0], (__m256d)r[1]);
  const __m256d low23 = _mm256_unpacklo_pd((__m256d)r[2], (__m256d)r[3]);
  const __m256d high23 = _mm256_unpackhi_pd((__m256d)r[2], (__m256d)r[3]);
  r[0] = (DoubleVec)_mm256_permute2f128_pd(low01, low23, 0x20);
  r[1] = (DoubleVec)_mm256_permute2f128_pd(high01, high23, 0x20);
  r[2] = (DoubleVec)_mm256_permute2f128_pd(low01, low23, 0x31);
  r[3] = (DoubleVec)_mm256_permute2f128_pd(high01, high23, 0x31);
}

// Lane i: the sum of the lanes of r[i]. Half the operations of a transpose: every step adds up what it has moved.
MHA_INLINE FloatVec lane_sums(FloatVec (&r)[8]) {
  __m256 pairs[4], quads[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m256 a = (__m256)r[2 * i], b = (__m256)r[2 * i + 1];
    pairs[i] = _mm256_unpacklo_ps(a, b) + _mm256_unpackhi_ps(a, b);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m256d a = (__m256d)pairs[2 * i], b = (__m256d)pairs[2 * i + 1];
    quads[i] = (__m256)_mm256_unpacklo_pd(a, b) + (__m256)_mm256_unpackhi_pd(a, b);
  }
  return (FloatVec)(_mm256_permute2f128_ps(quads[0], quads[1], 0x20) +
                    _mm256_permute2f128_ps(quads[0], quads[1], 0x31));
}

MHA_INLINE DoubleVec lane_sums(DoubleVec (&r)[4]) {
  __m256d pairs[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m256d a = (__m256d)r[2 * i], b = (__m256d)r[2 * i + 1];
    pairs[i] = _mm256_unpacklo_pd(a, b) + _mm256_unpackhi_pd(a, b);
  }
  return (DoubleVec)(_mm256_permute2f128_pd(pairs[0], pairs[1], 0x20) +
                     _mm256_permute2f128_pd(pairs[0], pairs[1], 0x31));
}
