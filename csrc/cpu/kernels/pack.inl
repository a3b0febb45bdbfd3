// Packing: from strided matrices of the storage type to contiguous words of the type that is multiplied.

// out[o * out_stride + i] = in[o * outer_stride + i * inner_stride] for o < outer and i < inner, widened; zeros follow
// until `inner` is a whole number of vectors. Whole vectors are written, so out_stride is at least that number.
template <class T>
struct Packer {
  using Word = accumulate_t<T>;
  static constexpr int W = kLanes<Word>;

  const T* in;
  int64_t outer_stride, inner_stride;
  int64_t outer, inner;
  Word* out;
  int64_t out_stride;

  void run() const {
    if (inner_stride == 1) copy_rows();
    else if (outer_stride == 1) transpose_blocks();
    else gather();
  }

  void copy_rows() const {
    for (int64_t o = 0; o < outer; ++o) {
      const T* from = in + o * outer_stride;
      Word* to = out + o * out_stride;
      int64_t i = 0;
      for (; i + W <= inner; i += W) store<Word>(to + i, load<T>(from + i));
      if (i < inner) store<Word>(to + i, load_first<T>(from + i, static_cast<int>(inner - i)));
    }
  }

  void transpose_blocks() const {
    for (int64_t i = 0; i < inner; i += W)
      for (int64_t o = 0; o < outer; o += W) {
        if (i + W <= inner && o + W <= outer) transpose_block(o, i);
        else transpose_edge(o, i);
      }
  }

  // W x W: the vectors run along the outer index in memory and along the inner one in `out`.
  void transpose_block(int64_t o, int64_t i) const {
    const T* from = in + o + i * inner_stride;
    Word* to = out + o * out_stride + i;
    Vec<Word> r[W];  // in registers, as long as every index is a constant
#pragma GCC unroll 16
    for (int j = 0; j < W; ++j) r[j] = load<T>(from + j * inner_stride);
    transpose(r);
#pragma GCC unroll 16
    for (int j = 0; j < W; ++j) store<Word>(to + j * out_stride, r[j]);
  }

  // A block of which less than W x W exists.
  __attribute__((noinline)) void transpose_edge(int64_t o, int64_t i) const {
    const int lines = static_cast<int>(min_of(W, inner - i)), lanes = static_cast<int>(min_of(W, outer - o));
    const T* from = in + o + i * inner_stride;
    Word* to = out + o * out_stride + i;
    Vec<Word> r[W] = {};
    for (int j = 0; j < lines; ++j, from += inner_stride)
      r[j] = lanes == W ? load<T>(from) : load_first<T>(from, lanes);
    transpose(r);
    for (int j = 0; j < lanes; ++j) store<Word>(to + j * out_stride, r[j]);
  }

  void gather() const {
    const int64_t padded = round_up(inner, W);
    for (int64_t o = 0; o < outer; ++o)
      for (int64_t i = 0; i < padded; ++i)
        out[o * out_stride + i] = i < inner ? widen(in[o * outer_stride + i * inner_stride]) : 0;
  }
};

template <class T>
MHA_INLINE bool is_finite(T x) {
  return widen(x) - widen(x) == 0;
}

// A factor of a product, seen as `count` rows or columns of the output times `depth`.
template <class T>
struct Factor {
  const T* data;
  int64_t stride, depth_stride;  // from one row or column to the next; from one depth to the next
  int64_t count, depth;
};

// The factor with NaN and infinities as zeros, in contiguous columns.
template <class T>
Factor<T> keep_finite(const Factor<T>& f, T* out) {
  for (int64_t k = 0; k < f.depth; ++k)
    for (int64_t i = 0; i < f.count; ++i) {
      const T x = f.data[k * f.depth_stride + i * f.stride];
      out[k * f.count + i] = is_finite(x) ? x : T{};
    }
  return {out, 1, f.count, f.count, f.depth};
}
