// Vector layer, AVX2 + FMA + F16C: 32-byte registers.

constexpr int kVectorBytes = 32;
constexpr int kRegisters = 16;

typedef float FloatVec __attribute__((vector_size(kVectorBytes)));
typedef double DoubleVec __attribute__((vector_size(kVectorBytes)));

typedef uint64_t WordVec __attribute__((vector_size(kVectorBytes)));
typedef int32_t Int32Vec __attribute__((vector_size(kVectorBytes)));
typedef int64_t Int64Vec __attribute__((vector_size(kVectorBytes)));
MHA_INLINE WordVec multiply_low_words(WordVec a, WordVec b) {
  return (WordVec)_mm256_mul_epu32((__m256i)a, (__m256i)b);
}
MHA_INLINE Int32Vec int32_from(const uint8_t* p) {
  return (Int32Vec)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
MHA_INLINE Int32Vec int32_from(const uint16_t* p) {
  return (Int32Vec)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
MHA_INLINE Int64Vec int64_from(const uint8_t* p) {
  int32_t bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return (Int64Vec)_mm256_cvtepu8_epi64(_mm_cvtsi32_si128(bytes));
}
MHA_INLINE Int64Vec int64_from(const uint16_t* p) {
  return (Int64Vec)_mm256_cvtepu16_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
MHA_INLINE uint32_t nonzero_bits(const uint8_t* p) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return ~static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes, _mm256_setzero_si256())));
}

MHA_INLINE FloatVec widen_bfloat16(const bfloat16* p) {
  const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return (FloatVec)_mm256_slli_epi32(words, 16);
}
MHA_INLINE FloatVec widen_float16(const float16* p) {
  return (FloatVec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
MHA_INLINE void narrow_float16(float16* p, FloatVec v) {
  const __m128i halves = _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), halves);
}
// Round to nearest even by adding 0x7FFF plus the lowest kept bit; NaN keeps its top bits and stays quiet.
MHA_INLINE void narrow_bfloat16(bfloat16* p, FloatVec v) {
  const __m256i bits = _mm256_castps_si256((__m256)v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps((__m256)v, (__m256)v, _CMP_UNORD_Q));
  const __m256i words = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
  const __m128i low = _mm256_castsi256_si128(words), high = _mm256_extracti128_si256(words, 1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packus_epi32(low, high));
}

MHA_INLINE FloatVec vec_max(FloatVec a, FloatVec b) { return (FloatVec)_mm256_max_ps((__m256)a, (__m256)b); }
MHA_INLINE DoubleVec vec_max(DoubleVec a, DoubleVec b) { return (DoubleVec)_mm256_max_pd((__m256d)a, (__m256d)b); }
MHA_INLINE FloatVec mul_add(FloatVec a, FloatVec b, FloatVec c) {
  return (FloatVec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
MHA_INLINE DoubleVec mul_add(DoubleVec a, DoubleVec b, DoubleVec c) {
  return (DoubleVec)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
}
MHA_INLINE void stream(float* p, FloatVec v) { _mm256_stream_ps(p, (__m256)v); }
MHA_INLINE void stream(double* p, DoubleVec v) { _mm256_stream_pd(p, (__m256d)v); }
MHA_INLINE void stream_half(void* p, const void* v) {
  _mm_stream_si128(static_cast<__m128i*>(p), _mm_loadu_si128(static_cast<const __m128i*>(v)));
}
MHA_INLINE void stream_fence() { _mm_sfence(); }
