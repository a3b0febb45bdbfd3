// The part of C that one task computes: how sums in registers get there.

// Whether a result is so large that it leaves the caches before anyone reads it: then it need not pass through them.
template <class T>
bool bypasses_caches(const BatchShape& batch, int64_t rows, int64_t cols, const Output& out) {
  const int64_t bytes = batch.count() * rows * cols * static_cast<int64_t>(sizeof(T));
  if (bytes < kStreamBytes || out.col_stride != 1) return false;
  int64_t strides = out.row_stride;
  for (int d = 0; d < batch.ndim; ++d) strides |= out.batch_stride[d];
  constexpr int64_t kLine = kCacheLine / sizeof(T);
  return strides % kLine == 0 && reinterpret_cast<uintptr_t>(out.data) % kCacheLine == 0;
}

template <class T, class Word>
struct ProductOutput {
  using Acc = accumulate_t<T>;
  using Rules = WordRules<Word>;
  static constexpr int W = kLanes<Acc>;
  static constexpr bool kKeepsSums = false;  // of tile registers: they pass through finish()

  const Product& p;
  const T* a;  // the matrices of this batch entry
  const T* b;
  T* c;
  int64_t row0, rows, col0, cols;
  bool streaming;          // C bypasses the caches
  Acc* partial = nullptr;  // rows x partial_stride sums over the blocks of the depth so far; null when there is one
  int64_t partial_stride = 0;
  bool first = true, last = true;  // the block of the depth at hand
  Vec<Acc> probe = {};             // with zero_hides: 0 until NaN or infinity comes out, then NaN for good

  ProductOutput(const Product& problem, const ProductSplit& s, int64_t task) : p(problem) {
    const int64_t entry = task / s.in_entry(), block = task % s.in_entry();
    a = matrix<const T>(p.batch, entry, p.a);
    b = matrix<const T>(p.batch, entry, p.b);
    c = matrix<T>(p.batch, entry, p.c);
    row0 = block % s.row_blocks * s.row_block;
    rows = min_of(s.row_block, p.m - row0);
    col0 = block / s.row_blocks * s.col_block;
    cols = min_of(s.col_block, p.n - col0);
    streaming = bypasses_caches<T>(p.batch, p.m, p.n, p.c);
  }

  T* at(int64_t i, int64_t j) const { return c + (row0 + i) * p.c.row_stride + (col0 + j) * p.c.col_stride; }

  // Asks for the lines that a tile of n_rows x NV vectors will write, while the tile is being computed.
  template <int NV>
  __attribute__((always_inline)) void prefetch(int64_t i, int n_rows, int64_t j) const {
    if (streaming || !last || p.c.col_stride != 1) return;
    constexpr int kLine = kCacheLine / static_cast<int>(sizeof(T));
    for (int r = 0; r < n_rows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < NV * W; v += kLine) __builtin_prefetch(at(i + r, j + v), 1);
  }

  // The sums of the tile whose corner is (i, j) over one block of the depth: kept when more blocks follow, else stored.
  // Every loop over `sum` is unrolled: one variable index, even on the rare path, would put all sums into memory.
  template <int R, int NV>
  __attribute__((always_inline)) void finish(Vec<Acc> (&sum)[R][NV], int64_t i, int64_t j) {
    if (partial) {
      add_partial(sum, partial + i * partial_stride + j);
      if (!last) return;
    }
    const Vec<Acc> alpha = splat(to_finite<Acc>(p.alpha));
    const int64_t width = min_of(NV * W, cols - j);
    T* out = at(i, j);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) sum[r][v] *= alpha;
    if (p.c.col_stride == 1 && width == NV * W) {
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) Rules::template store_row<T>(out + r * p.c.row_stride, sum[r], streaming);
    } else {
      Acc edge[R * NV * W];
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) store<Acc>(edge + (r * NV + v) * W, sum[r][v]);
      store_edge(out, edge, R, NV * W, width);
    }
    if (p.zero_hides) add_to_probe(sum);
  }

  template <int R, int NV>
  __attribute__((always_inline)) void add_partial(Vec<Acc> (&sum)[R][NV], Acc* part) const {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r, part += partial_stride)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        if (!first) sum[r][v] += load<Acc>(part + v * W);
        if (!last) store<Acc>(part + v * W, sum[r][v]);
      }
  }

  // 0 * x is 0 unless x is NaN or infinite.
  template <int R, int NV>
  __attribute__((always_inline)) void add_to_probe(const Vec<Acc> (&sum)[R][NV]) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) probe = mul_add(sum[r][v], Vec<Acc>{}, probe);
  }

  // With zero_hides: whether NaN or infinity came out (see VisibleProduct).
  bool spoilt() const { return lane_sum<Acc>(probe) != 0; }

  // Output that is no whole number of vectors, or whose columns are apart.
  __attribute__((noinline)) void store_edge(T* out, const Acc* edge, int n_rows, int stride, int64_t width) const {
    for (int r = 0; r < n_rows; ++r, edge += stride, out += p.c.row_stride) {
      int64_t j = 0;
      if (p.c.col_stride == 1) {
        for (; j + W <= width; j += W) store<T>(out + j, load<Acc>(edge + j));
        if (j < width) store_first<T>(out + j, load<Acc>(edge + j), static_cast<int>(width - j));
      } else {
        for (; j < width; ++j) out[j * p.c.col_stride] = narrow<T>(edge[j]);
      }
    }
  }
};
