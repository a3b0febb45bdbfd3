// The micro-kernel of all products: one tile of the output in registers.

// What one step multiplies and how. Here: one element, widened to the type of the sums. Levels with instructions for
// pairs of bfloat16 specialise it (product_pairs.inl, product_tiles.inl).
template <class Word>
struct WordRules {
  using Acc = Word;
  using Element = Word;                     // as it lies in rows along the depth
  static constexpr int kDepth = 1;          // elements per word
  static constexpr int kPanelPadding = 0;   // words between the rows of a packed panel
  static constexpr int kDepthMultiple = 1;  // depths are read in multiples of this
  static constexpr int64_t kDepthBlock = kBlockOfDepth;

  MHA_INLINE Vec<Acc> broadcast(const char* p) {
    Word x;
    std::memcpy(&x, p, sizeof x);
    return splat(x);
  }
  MHA_INLINE Vec<Acc> load_vector(const Word* p) { return load<Word>(p); }
  MHA_INLINE Vec<Acc> multiply_add(Vec<Acc> a, Vec<Acc> b, Vec<Acc> sum) { return mul_add(a, b, sum); }

  // out[depth][count], and out[count][depth].
  template <class T>
  static void pack_by_depth(const Factor<T>& f, Word* out, int64_t out_stride) {
    Packer<T>{f.data, f.depth_stride, f.stride, f.depth, f.count, out, out_stride}.run();
  }
  template <class T>
  static void pack_by_row(const Factor<T>& f, Word* out, int64_t out_stride) {
    Packer<T>{f.data, f.stride, f.depth_stride, f.count, f.depth, out, out_stride}.run();
  }

  // Whether the micro-kernel can read A where it is.
  template <class T>
  static bool reads_in_place(const Factor<T>& f) {
    return std::is_same_v<T, Word> && f.depth_stride == 1;
  }

  // A row of words from the kDepth rows of sums that they hold; and one of these again.
  MHA_INLINE void store_words(Word* out, const Vec<Acc> (&terms)[kDepth]) { store<Word>(out, terms[0]); }
  MHA_INLINE Vec<Acc> load_term(const Word* p, int) { return load<Word>(p); }

  // NV vectors of neighbouring columns, to unit-stride memory.
  template <class T, int NV>
  MHA_INLINE void store_row(T* out, const Vec<Acc> (&row)[NV], bool streaming) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v)
      if (streaming) store_streaming<T>(out + v * kLanes<Acc>, row[v]);
      else store<T>(out + v * kLanes<Acc>, row[v]);
  }

  static void begin() {}  // around every run of tasks
  static void end() {}
};

// sum[r][v] = sum over k of A[r][k] * B[k][v], one vector of columns per v.
// Registers: R * NV sums, NV vectors of B, one broadcast of A.
template <int R, int NV, class Word, class Acc = typename WordRules<Word>::Acc>
MHA_INLINE void multiply(const char* a, int64_t row_bytes, int64_t word_bytes, const Word* b, int64_t b_stride,
                         int64_t words, Vec<Acc> (&sum)[R][NV]) {
  using Rules = WordRules<Word>;
#pragma GCC unroll 4
  for (int64_t k = 0; k < words; ++k) {
    Vec<Acc> columns[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) columns[v] = Rules::load_vector(b + v * kLanes<Acc>);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const Vec<Acc> row = Rules::broadcast(a + r * row_bytes);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) sum[r][v] = Rules::multiply_add(row, columns[v], sum[r][v]);
    }
    a += word_bytes;
    b += b_stride;
  }
}
