// Vector layer, AVX-512 (F, BW, DQ, VL): 64-byte registers.

constexpr int kVectorBytes = 64;
constexpr int kRegisters = 32;

typedef float FloatVec __attribute__((vector_size(kVectorBytes)));
typedef double DoubleVec __attribute__((vector_size(kVectorBytes)));

typedef uint64_t WordVec __attribute__((vector_size(kVectorBytes)));
typedef int32_t Int32Vec __attribute__((vector_size(kVectorBytes)));
typedef int64_t Int64Vec __attribute__((vector_size(kVectorBytes)));
MHA_INLINE WordVec multiply_low_words(WordVec a, WordVec b) {
  return (WordVec)_mm512_mul_epu32((__m512i)a, (__m512i)b);
}
MHA_INLINE Int32Vec int32_from(const uint8_t* p) {
  return (Int32Vec)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
MHA_INLINE Int32Vec int32_from(const uint16_t* p) {
  return (Int32Vec)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
MHA_INLINE Int64Vec int64_from(const uint8_t* p) {
  return (Int64Vec)_mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
MHA_INLINE Int64Vec int64_from(const uint16_t* p) {
  return (Int64Vec)_mm512_cvtepu16_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
MHA_INLINE uint32_t nonzero_bits(const uint8_t* p) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm256_test_epi8_mask(bytes, bytes);
}

MHA_INLINE FloatVec widen_bfloat16(const bfloat16* p) {
  const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return (FloatVec)_mm512_slli_epi32(words, 16);
}
MHA_INLINE FloatVec widen_float16(const float16* p) {
  return (FloatVec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
MHA_INLINE void narrow_float16(float16* p, FloatVec v) {
  const __m256i halves = _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), halves);
}
// Round to nearest even by adding 0x7FFF plus the lowest kept bit; NaN keeps its top bits and stays quiet. Levels with
// avx512_bf16 have one instruction for it, but that one flushes subnormals.
MHA_INLINE void narrow_bfloat16(bfloat16* p, FloatVec v) {
  const __m512i bits = _mm512_castps_si512((__m512)v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  const __mmask16 is_nan = _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q);
  const __m512i words = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(words, 16)));
}

MHA_INLINE FloatVec vec_max(FloatVec a, FloatVec b) { return (FloatVec)_mm512_max_ps((__m512)a, (__m512)b); }
MHA_INLINE DoubleVec vec_max(DoubleVec a, DoubleVec b) { return (DoubleVec)_mm512_max_pd((__m512d)a, (__m512d)b); }
MHA_INLINE FloatVec mul_add(FloatVec a, FloatVec b, FloatVec c) {
  return (FloatVec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
MHA_INLINE DoubleVec mul_add(DoubleVec a, DoubleVec b, DoubleVec c) {
  return (DoubleVec)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
}
MHA_INLINE void stream(float* p, FloatVec v) { _mm512_stream_ps(p, (__m512)v); }
MHA_INLINE void stream(double* p, DoubleVec v) { _mm512_stream_pd(p, (__m512d)v); }
MHA_INLINE void stream_half(void* p, const void* v) {
  _mm256_stream_si256(static_cast<__m256i*>(p), _mm256_loadu_si256(static_cast<const __m256i*>(v)));
}
MHA_INLINE void stream_fence() { _mm_sfence(); }
