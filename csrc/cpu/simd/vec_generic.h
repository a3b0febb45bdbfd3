// Vector layer, baseline: 16-byte registers (SSE2 on x86-64, NEON on aarch64), scalar conversions. Read this one first.

constexpr int kVectorBytes = 16;
constexpr int kRegisters = 16;  // vector registers a micro-kernel may plan with

typedef float FloatVec __attribute__((vector_size(kVectorBytes)));
typedef double DoubleVec __attribute__((vector_size(kVectorBytes)));

// Integers. multiply_low_words: the 64-bit products of the lanes' low halves. int32_from, int64_from: one register of
// small unsigned integers from memory.
typedef uint64_t WordVec __attribute__((vector_size(kVectorBytes)));
typedef int32_t Int32Vec __attribute__((vector_size(kVectorBytes)));
typedef int64_t Int64Vec __attribute__((vector_size(kVectorBytes)));
MHA_INLINE WordVec multiply_low_words(WordVec a, WordVec b) { return (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu); }
MHA_INLINE Int32Vec int32_from(const uint8_t* p) { return Int32Vec{p[0], p[1], p[2], p[3]}; }
MHA_INLINE Int32Vec int32_from(const uint16_t* p) { return Int32Vec{p[0], p[1], p[2], p[3]}; }
MHA_INLINE Int64Vec int64_from(const uint8_t* p) { return Int64Vec{p[0], p[1]}; }
MHA_INLINE Int64Vec int64_from(const uint16_t* p) { return Int64Vec{p[0], p[1]}; }

// Bit i: byte i of 32 is not 0. (Eight bytes of 0 or 1, times that number, leave their bits side by side on top.)
MHA_INLINE uint32_t nonzero_bits(const uint8_t* p) {
  uint32_t bits = 0;
  for (int i = 0; i < 4; ++i) {
    uint64_t ones = 0;
    for (int b = 0; b < 8; ++b) ones |= uint64_t{p[8 * i + b] != 0} << (8 * b);
    bits |= static_cast<uint32_t>(ones * 0x0102040810204080 >> 56) << (8 * i);
  }
  return bits;
}

template <class Half>
MHA_INLINE FloatVec widen_lanes(const Half* p) {
  return FloatVec{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])};
}
template <class Half>
MHA_INLINE void narrow_lanes(Half* p, FloatVec v) {
  for (int i = 0; i < 4; ++i) p[i] = narrow<Half>(v[i]);
}
MHA_INLINE FloatVec widen_bfloat16(const bfloat16* p) { return widen_lanes(p); }
MHA_INLINE FloatVec widen_float16(const float16* p) { return widen_lanes(p); }
MHA_INLINE void narrow_bfloat16(bfloat16* p, FloatVec v) { narrow_lanes(p, v); }
MHA_INLINE void narrow_float16(float16* p, FloatVec v) { narrow_lanes(p, v); }

MHA_INLINE FloatVec vec_max(FloatVec a, FloatVec b) { return a > b ? a : b; }
MHA_INLINE DoubleVec vec_max(DoubleVec a, DoubleVec b) { return a > b ? a : b; }

// a * b + c with one rounding where the machine has it. The baseline has none.
MHA_INLINE FloatVec mul_add(FloatVec a, FloatVec b, FloatVec c) { return a * b + c; }
MHA_INLINE DoubleVec mul_add(DoubleVec a, DoubleVec b, DoubleVec c) { return a * b + c; }

// Stores that do not bring the line into the cache; p is aligned to kVectorBytes (stream_half: to half of it, which is
// also what it copies). The baseline has none.
MHA_INLINE void stream(float* p, FloatVec v) { *reinterpret_cast<FloatVec*>(p) = v; }
MHA_INLINE void stream(double* p, DoubleVec v) { *reinterpret_cast<DoubleVec*>(p) = v; }
MHA_INLINE void stream_half(void* p, const void* v) { std::memcpy(p, v, kVectorBytes / 2); }
MHA_INLINE void stream_fence() {}
