// bfloat16 products on AMX tiles. A tile register holds 16 rows of 64 bytes; one instruction adds to a tile of 16 x 16
// sums the product of a tile of A (16 rows of 16 pairs) and a tile of B (16 pairs deep, 16 columns). B is packed as for
// dot products of pairs; depths and rows that fill no tile are packed with zeros behind them.

struct TilePair {
  BfloatPair pair;
};

constexpr int kTileRows = 16, kTileDepth = 32;  // of a tile of A; a tile of B is 16 columns wide

// What LDTILECFG reads (Intel SDM, volume 1, chapter 18).
struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

template <>
struct WordRules<TilePair> {
  using Acc = float;
  using Element = bfloat16;
  static constexpr int kDepth = 2;
  // Loading a tile touches 16 lines. Were they a power of two apart, they would fall into few sets of the cache and
  // push each other out (measured: 3 ns a tile at 320 bytes, 9 ns at 256, up to 20 ns at 1024).
  static constexpr int kPanelPadding = 16;
  static constexpr int kDepthMultiple = kTileDepth;
  static constexpr int64_t kDepthBlock = kTileBlockOfDepth;

  // Zeros up to whole tiles.
  static void pack_by_depth(const Factor<bfloat16>& f, TilePair* out, int64_t out_stride) {
    PairPacker{f, &out->pair, out_stride}.by_depth();
    const int64_t used = ceil_div(f.depth, 2) * out_stride, all = round_up(f.depth, kTileDepth) / 2 * out_stride;
    std::memset(out + used, 0, (all - used) * sizeof(TilePair));
  }
  static void pack_by_row(const Factor<bfloat16>& f, TilePair* out, int64_t out_stride) {
    PairPacker{f, &out->pair, out_stride}.by_row();
  }

  static bool reads_in_place(const Factor<bfloat16>& f) {
    return f.depth_stride == 1 && f.depth % kTileDepth == 0 && f.count % kTileRows == 0;
  }

  MHA_INLINE void store_words(TilePair* out, const FloatVec (&terms)[2]) {
    WordRules<BfloatPair>::store_words(&out->pair, terms);
  }
  MHA_INLINE FloatVec load_term(const TilePair* p, int i) { return WordRules<BfloatPair>::load_term(&p->pair, i); }

  template <class T, int NV>
  MHA_INLINE void store_row(bfloat16* out, const FloatVec (&row)[NV], bool streaming) {
    WordRules<BfloatPair>::store_row<T>(out, row, streaming);
  }

  // All eight tiles are used at full size: 0-3 sums, 4-5 A, 6-7 B.
  static void begin() {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) config.row_bytes[tile] = 64, config.rows[tile] = 16;
    // gcc 12 believes that the instruction reads 8 bytes, and may leave out what is stored to the others.
    __asm__ volatile("" : : "m"(config));
    _tile_loadconfig(&config);
  }
  static void end() { _tile_release(); }
};

// 16 * MT rows x 16 * NT columns of sums, through memory: out[row][out_stride], `add`: to what is there.
// The barriers tell the compiler that the tile instructions read and write memory; it does not look into them.
// Prefetches are spread over the tile instructions: a burst of them occupies all buffers that wait for lines, and then
// no tile can be loaded from the second-level cache (weighted_sum +5 % against 16 lines at once).
template <int MT, int NT>
MHA_INLINE void multiply_tiles(const char* a, int64_t row_bytes, const TilePair* b, int64_t b_stride, int64_t words,
                               float* out, int64_t out_stride, bool add, Prefetcher& next, int lines_per_step) {
  __asm__ volatile("" ::: "memory");
  const int64_t b_bytes = b_stride * static_cast<int64_t>(sizeof(TilePair));
  constexpr int kInstructions = MT + NT + MT * NT;
  const int64_t lines = ceil_div(lines_per_step, kInstructions);
  const int64_t out_bytes = out_stride * static_cast<int64_t>(sizeof(float));
  if (add) {
    _tile_loadd(0, out, out_bytes);
    if constexpr (NT == 2) _tile_loadd(1, out + 16, out_bytes);
    if constexpr (MT == 2) _tile_loadd(2, out + kTileRows * out_stride, out_bytes);
    if constexpr (MT == 2 && NT == 2) _tile_loadd(3, out + kTileRows * out_stride + 16, out_bytes);
  } else {
    _tile_zero(0);
    if constexpr (NT == 2) _tile_zero(1);
    if constexpr (MT == 2) _tile_zero(2);
    if constexpr (MT == 2 && NT == 2) _tile_zero(3);
  }
  for (int64_t k = 0; k < words; k += 16) {
    const char* a_tile = a + k * static_cast<int64_t>(sizeof(TilePair));
    const TilePair* b_tile = b + k * b_stride;
    next.step(lines);
    _tile_loadd(4, a_tile, row_bytes);
    next.step(lines);
    _tile_loadd(6, b_tile, b_bytes);
    next.step(lines);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (NT == 2) {
      next.step(lines);
      _tile_loadd(7, b_tile + 16, b_bytes);
      next.step(lines);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (MT == 2) {
      next.step(lines);
      _tile_loadd(5, a_tile + kTileRows * row_bytes, row_bytes);
      next.step(lines);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (MT == 2 && NT == 2) {
      next.step(lines);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, out, out_bytes);
  if constexpr (NT == 2) _tile_stored(1, out + 16, out_bytes);
  if constexpr (MT == 2) _tile_stored(2, out + kTileRows * out_stride, out_bytes);
  if constexpr (MT == 2 && NT == 2) _tile_stored(3, out + kTileRows * out_stride + 16, out_bytes);
  __asm__ volatile("" ::: "memory");
}

template <>
struct PanelRows<TilePair> {
  using Left = RowFactor;

  static RowFactor prepare(const Factor<bfloat16>& f, TilePair* scratch) {
    return WordRules<TilePair>::reads_in_place(f) ? rows_in_place<TilePair>(f) : packed_rows(f, scratch);
  }

  template <int NV, class Task>
  static void run(Task& task, const Left& left, const TilePair* right, int64_t stride, int64_t j, int64_t words) {
    int i = 0;
    for (; i + kTileRows < task.rows; i += 2 * kTileRows) strip<2, NV>(task, left, right, stride, i, j, words);
    if (i < task.rows) strip<1, NV>(task, left, right, stride, i, j, words);
  }

  // 16 * MT rows of the whole panel.
  template <int MT, int NV, class Task>
  static void strip(Task& task, const Left& left, const TilePair* right, int64_t stride, int i, int64_t j,
                    int64_t words) {
    constexpr int kRows = MT * kTileRows, kPasses = (NV + 1) / 2, kLines = kRows / kPasses;
    const char* rows = left.row(i);
    const bool streams = left.streams && i + 2 * kRows <= task.rows && task.cols <= NV * 16;
    const int64_t bytes = words * static_cast<int64_t>(sizeof(TilePair));
    Prefetcher next = {rows + kRows * left.row_bytes, left.row_bytes, bytes, streams ? kRows * bytes / kCacheLine : 0};
    task.ahead.step(kRows);
    alignas(64) float buffer[Task::kKeepsSums ? 1 : kRows * NV * 16];
    float* sums = buffer;
    int64_t sums_stride = NV * 16;
    bool add = false;
    if constexpr (Task::kKeepsSums) sums = task.sums_at(i, j), sums_stride = task.stride, add = task.add;
    if constexpr (NV >= 2)
      multiply_tiles<MT, 2>(rows, left.row_bytes, right, stride, words, sums, sums_stride, add, next, kLines);
    if constexpr (NV == 4)
      multiply_tiles<MT, 2>(rows, left.row_bytes, right + 32, stride, words, sums + 32, sums_stride, add, next, kLines);
    if constexpr (NV % 2 == 1)
      multiply_tiles<MT, 1>(rows, left.row_bytes, right + (NV - 1) * 16, stride, words, sums + (NV - 1) * 16,
                            sums_stride, add, next, kLines);
    const int count = static_cast<int>(min_of(kRows, task.rows - i));
    if constexpr (Task::kKeepsSums) {
      task.template sums_kept<NV>(i, count, j);
    } else {
      int r = 0;
      for (; r + 4 <= count; r += 4) pass_on<4, NV>(task, sums + r * NV * 16, i + r, j);
      for (; r < count; ++r) pass_on<1, NV>(task, sums + r * NV * 16, i + r, j);
    }
  }

  template <int R, int NV, class Task>
  MHA_INLINE void pass_on(Task& task, const float* sums, int64_t i, int64_t j) {
    FloatVec sum[R][NV];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) sum[r][v] = load<float>(sums + (r * NV + v) * 16);
    task.finish(sum, i, j);
  }
};

// Tiles pay when they are filled: below that, configuring and padding cost more than dot products of pairs.
template <>
struct ProductKernel<bfloat16> {
  using Pairs = ProductOf<bfloat16, BfloatPair>;
  using Tiles = ProductOf<bfloat16, TilePair>;

  static bool fills_tiles(const Product& p) { return p.m >= kTileRows && p.n >= 16 && p.k >= kTileDepth; }

  static int64_t tasks(const Product& p) { return fills_tiles(p) ? Tiles::tasks(p) : Pairs::tasks(p); }
  static void run(const Product& p, int64_t begin, int64_t end) {
    return fills_tiles(p) ? Tiles::run(p, begin, end) : Pairs::run(p, begin, end);
  }
};

template <>
struct FusedWord<bfloat16> {
  using type = TilePair;
};
