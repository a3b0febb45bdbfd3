// bfloat16 products by dot products of pairs (AVX512-BF16): sum += a[2k] * b[2k] + a[2k+1] * b[2k+1] in float, one word
// of 32 bits for each pair. The instructions take subnormal factors as zero and flush subnormal sums; torch's products
// use the same ones. An odd depth is filled up with zeros.

struct BfloatPair {
  uint32_t bits;
};

// The first n of 32 elements (16 words); zeros follow. n may be larger, and negative.
MHA_INLINE __m512i load_pairs(const bfloat16* p, int64_t n) {
  if (n >= 32) return _mm512_loadu_si512(p);
  const __mmask32 wanted = n <= 0 ? 0u : (1u << n) - 1;
  return _mm512_maskz_loadu_epi16(wanted, p);
}

// Word i = (even[i], odd[i]) for i < n; the others are zero. A missing odd row (null) counts as zeros.
MHA_INLINE __m512i interleave(const bfloat16* even, const bfloat16* odd, int64_t n) {
  const __mmask16 wanted = n >= 16 ? 0xFFFFu : n <= 0 ? 0u : (1u << n) - 1;
  const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(wanted, even));
  if (!odd) return low;
  const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(wanted, odd));
  return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

// Packs into pairs. Whole vectors of 16 words are written: rows of `out` are at least that long, and words past the end
// are zero.
struct PairPacker {
  Factor<bfloat16> f;
  BfloatPair* out;
  int64_t out_stride;

  const bfloat16* at(int64_t i, int64_t k) const { return f.data + i * f.stride + k * f.depth_stride; }

  BfloatPair pair(int64_t i, int64_t k) const {
    const uint32_t low = at(i, k)->bits, high = k + 1 < f.depth ? at(i, k + 1)->bits : 0;
    return {low | high << 16};
  }

  // Words of rows (or columns) i.. at depths k, k + 1, side by side.
  __m512i beside(int64_t i, int64_t k) const {
    return interleave(at(i, k), k + 1 < f.depth ? at(i, k + 1) : nullptr, k < f.depth ? f.count - i : 0);
  }

  static void put(BfloatPair* to, __m512i words) { _mm512_storeu_si512(to, words); }

  // out[depth / 2][count]
  void by_depth() const {
    if (f.stride == 1) {
      for (int64_t k = 0; k < f.depth; k += 2)
        for (int64_t i = 0; i < f.count; i += 16) put(out + k / 2 * out_stride + i, beside(i, k));
    } else if (f.depth_stride == 1) {
      for (int64_t i = 0; i < f.count; i += 16)
        for (int64_t k = 0; k < f.depth; k += 32) {
          FloatVec r[16];
#pragma GCC unroll 16
          for (int line = 0; line < 16; ++line)
            r[line] = (FloatVec)load_pairs(at(i + line, k), i + line < f.count ? f.depth - k : 0);
          transpose(r);
          const int64_t pairs = min_of(16, (f.depth - k + 1) / 2);
#pragma GCC unroll 16
          for (int line = 0; line < 16; ++line)
            if (line < pairs) put(out + (k / 2 + line) * out_stride + i, (__m512i)r[line]);
        }
    } else {
      for (int64_t k = 0; k < f.depth; k += 2)
        for (int64_t i = 0; i < round_up(f.count, 16); ++i)
          out[k / 2 * out_stride + i] = i < f.count ? pair(i, k) : BfloatPair{0};
    }
  }

  // out[count][depth / 2]
  void by_row() const {
    if (f.depth_stride == 1) {
      for (int64_t i = 0; i < f.count; ++i)
        for (int64_t k = 0; k < f.depth; k += 32) put(out + i * out_stride + k / 2, load_pairs(at(i, k), f.depth - k));
    } else if (f.stride == 1) {
      // One line of the next 32 depths for every vector of these, which adds up to all of them
      // (weighted_sum_over_queries +14 %).
      const int64_t below = max_of(0, f.depth - 32);
      Prefetcher next = Prefetcher::of(Factor<bfloat16>{at(0, 32), 1, f.depth_stride, f.count, below});
      for (int64_t k = 0; k < f.depth; k += 32)
        for (int64_t i = 0; i < f.count; i += 16) {
          FloatVec r[16];
#pragma GCC unroll 16
          for (int line = 0; line < 16; ++line) {
            next.step(1);
            r[line] = (FloatVec)beside(i, k + 2 * line);
          }
          transpose(r);
#pragma GCC unroll 16
          for (int line = 0; line < 16; ++line)
            if (i + line < f.count) put(out + (i + line) * out_stride + k / 2, (__m512i)r[line]);
        }
    } else {
      for (int64_t i = 0; i < f.count; ++i)
        for (int64_t k = 0; k < round_up(f.depth, 32); k += 2)
          out[i * out_stride + k / 2] = k < f.depth ? pair(i, k) : BfloatPair{0};
    }
  }
};

template <>
struct WordRules<BfloatPair> {
  using Acc = float;
  using Element = bfloat16;
  static constexpr int kDepth = 2;
  static constexpr int kPanelPadding = 0;
  static constexpr int kDepthMultiple = 2;
  static constexpr int64_t kDepthBlock = 2 * kBlockOfDepth;

  MHA_INLINE FloatVec broadcast(const char* p) {
    int32_t bits;
    std::memcpy(&bits, p, sizeof bits);
    return (FloatVec)_mm512_set1_epi32(bits);
  }
  MHA_INLINE FloatVec load_vector(const BfloatPair* p) { return (FloatVec)_mm512_loadu_si512(p); }
  MHA_INLINE FloatVec multiply_add(FloatVec a, FloatVec b, FloatVec sum) {
    return (FloatVec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }

  static void pack_by_depth(const Factor<bfloat16>& f, BfloatPair* out, int64_t out_stride) {
    PairPacker{f, out, out_stride}.by_depth();
  }
  static void pack_by_row(const Factor<bfloat16>& f, BfloatPair* out, int64_t out_stride) {
    PairPacker{f, out, out_stride}.by_row();
  }

  static bool reads_in_place(const Factor<bfloat16>& f) { return f.depth_stride == 1 && f.depth % 2 == 0; }

  MHA_INLINE void store_words(BfloatPair* out, const FloatVec (&terms)[2]) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)terms[1], (__m512)terms[0]);
    const __m512i side_by_side = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                                  22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    _mm512_storeu_si512(out, _mm512_permutexvar_epi16(side_by_side, both));
  }
  MHA_INLINE FloatVec load_term(const BfloatPair* p, int i) {
    const __m512i words = _mm512_loadu_si512(p);
    return (FloatVec)(i ? _mm512_and_si512(words, _mm512_set1_epi32(-0x10000)) : _mm512_slli_epi32(words, 16));
  }

  // One instruction narrows two vectors.
  template <class T, int NV>
  MHA_INLINE void store_row(bfloat16* out, const FloatVec (&row)[NV], bool streaming) {
#pragma GCC unroll 2
    for (int v = 0; v + 2 <= NV; v += 2) {
      const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)row[v + 1], (__m512)row[v]);
      if (streaming) _mm512_stream_si512(reinterpret_cast<__m512i*>(out + v * 16), both);
      else _mm512_storeu_si512(out + v * 16, both);
    }
    if constexpr (NV % 2 == 1)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + (NV - 1) * 16),
                          (__m256i)_mm512_cvtneps_pbh((__m512)row[NV - 1]));
  }

  static void begin() {}
  static void end() {}
};
