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
