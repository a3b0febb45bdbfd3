// The two products of the fused kernels on the micro-kernel: where the factors lie, and what becomes of the sums.

// Words in which elements T are multiplied; levels with instructions for pairs of bfloat16 say otherwise.
template <class T>
struct FusedWord {
  using type = accumulate_t<T>;
};

// A factor that the micro-kernel reads where it is, element by element: any strides will do.
template <class Word>
RowFactor any_rows(const Factor<Word>& f) {
  constexpr int64_t kWord = sizeof(Word);
  return {reinterpret_cast<const char*>(f.data), f.stride * kWord, f.depth_stride * kWord, INT32_MAX, 0, false};
}

// Rows that are a multiple of this apart fall into one set of the first-level cache.
constexpr int64_t kCrowdedBytes = 4096;

// A = rows of keys or values with head_dim as depth. In place where possible; packing pays when rows are crowded and
// several panels meet them.
template <class T, class Word>
RowFactor head_rows(const Factor<T>& f, Word* room, int64_t panels) {
  if constexpr (std::is_same_v<T, Word>) {
    const bool crowded = f.stride * static_cast<int64_t>(sizeof(T)) % kCrowdedBytes == 0;
    return crowded && panels > 1 ? packed_rows(f, room) : any_rows(f);
  } else {
    return WordRules<Word>::reads_in_place(f) ? rows_in_place<Word>(f) : packed_rows(f, room);
  }
}

// A = the transpose: rows are elements of the head, the depth is keys.
template <class T, class Word>
RowFactor head_columns(const Factor<T>& f, Word* room, int64_t panels) {
  if constexpr (std::is_same_v<T, Word>) {
    const bool crowded = f.depth_stride * static_cast<int64_t>(sizeof(T)) % kCrowdedBytes == 0;
    if (!crowded || panels == 1) return any_rows(f);
  }
  return PanelRows<Word>::prepare(f, room);
}

// Words that a packed factor of rows x depth takes, whichever way it is packed.
template <class Word>
int64_t packed_words(int64_t rows, int64_t depth) {
  using Rules = WordRules<Word>;
  constexpr int W = kLanes<typename Rules::Acc>;
  const int64_t words = round_up(ceil_div(depth, Rules::kDepth), 2 * W) + W;
  return round_up(rows, kPackedRows<typename Rules::Acc>) * words;
}

// What the micro-kernel asks of the owner of a product; prefetching is the owner's business here. kKeepsSums: tile
// registers may put their sums straight into the tile, up to 31 rows behind the last included.
template <class Acc_>
struct TileSink {
  using Acc = Acc_;
  static constexpr int W = kLanes<Acc>;
  int64_t rows, cols;
  Acc* tile;
  int64_t stride;
  bool add = false;  // to what is in the tile
  Prefetcher ahead = {};

  template <int NV>
  MHA_INLINE_MEMBER void prefetch(int64_t, int, int64_t) const {}
  MHA_INLINE_MEMBER Acc* sums_at(int64_t i, int64_t j) const { return tile + i * stride + j; }
};

// tile = the product, or tile + the product.
template <class Acc>
struct SumSink : TileSink<Acc> {
  static constexpr bool kKeepsSums = true;

  template <int NV>
  MHA_INLINE_MEMBER void sums_kept(int64_t, int, int64_t) const {}

  template <int R, int NV>
  MHA_INLINE_MEMBER void finish(Vec<Acc> (&sum)[R][NV], int64_t i, int64_t j) {
    constexpr int W = kLanes<Acc>;
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        Acc* out = this->sums_at(i + r, j + v * W);
        store<Acc>(out, this->add ? load<Acc>(out) + sum[r][v] : sum[r][v]);
      }
  }
};

// tile = the product; max: the largest of each lane so far.
template <class Acc>
struct ScoreSink : TileSink<Acc> {
  static constexpr bool kKeepsSums = true;
  Acc* max;

  // The sums of rows i .. i + count - 1 are in the tile.
  template <int NV>
  MHA_INLINE_MEMBER void sums_kept(int64_t i, int count, int64_t j) const {
    constexpr int W = kLanes<Acc>;
    Vec<Acc> top[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) top[v] = load<Acc>(max + j + v * W);
    for (int r = 0; r < count; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) top[v] = vec_max(load<Acc>(this->sums_at(i + r, j + v * W)), top[v]);
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) store<Acc>(max + j + v * W, top[v]);
  }

  template <int R, int NV>
  MHA_INLINE_MEMBER void finish(Vec<Acc> (&sum)[R][NV], int64_t i, int64_t j) {
    constexpr int W = kLanes<Acc>;
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      Vec<Acc> top = load<Acc>(max + j + v * W);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        store<Acc>(this->sums_at(i + r, j + v * W), sum[r][v]);
        top = vec_max(sum[r][v], top);
      }
      store<Acc>(max + j + v * W, top);
    }
  }
};

// tile = tile * alpha + the product, or the product alone where there is nothing yet.
template <class Acc>
struct OutputSink : TileSink<Acc> {
  static constexpr bool kKeepsSums = false;
  const Acc* alpha;
  bool first;

  template <int R, int NV>
  MHA_INLINE_MEMBER void finish(Vec<Acc> (&sum)[R][NV], int64_t i, int64_t j) {
    constexpr int W = kLanes<Acc>;
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      const Vec<Acc> factor = load<Acc>(alpha + j + v * W);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        Acc* out = this->sums_at(i + r, j + v * W);
        store<Acc>(out, first ? sum[r][v] : mul_add(load<Acc>(out), factor, sum[r][v]));
      }
    }
  }
};
