// All rows of a task against one panel of columns.

// Brings what comes next into the second-level cache a few lines at a time and in the order of memory, while the
// present is computed: tiles and transposes touch many rows at once, which no hardware prefetcher follows.
struct Prefetcher {
  const char* row = nullptr;
  int64_t row_bytes = 0, line_end = 0;
  int64_t lines = 0;  // that remain
  int64_t pace = 1;   // lines per step
  int64_t line = 0;

  template <class T>
  static Prefetcher of(const Factor<T>& f) {
    constexpr int64_t kElement = sizeof(T);
    const bool by_depth = f.stride == 1;
    const int64_t rows = by_depth ? f.depth : f.count, bytes = (by_depth ? f.count : f.depth) * kElement;
    return {reinterpret_cast<const char*>(f.data), (by_depth ? f.depth_stride : f.stride) * kElement, bytes,
            rows * ceil_div(bytes, kCacheLine)};
  }

  // All of it within so many steps.
  Prefetcher within(int64_t steps) const {
    Prefetcher paced = *this;
    paced.pace = ceil_div(lines, max_of(1, steps));
    return paced;
  }

  void step(int64_t steps) {
    const int64_t count = min_of(steps * pace, lines);
    for (int64_t n = 0; n < count; ++n) {
      __builtin_prefetch(row + line, 0, 2);
      line += kCacheLine;
      if (line >= line_end) line = 0, row += row_bytes;
    }
    lines -= count;
  }
};

// Where the micro-kernel finds A: in place, or packed in groups of rows.
struct RowFactor {
  const char* base;
  int64_t row_bytes, word_bytes;
  int group_rows;
  int64_t group_bytes;
  bool streams;  // lies where the caller keeps it, perhaps far from the caches

  const char* row(int row) const {
    const int group = row / group_rows;
    return base + group * group_bytes + (row - group * group_rows) * row_bytes;
  }
};

// A[row][depth]. One vector more than the depth: rows that are 4096 bytes apart would crowd one set of the cache.
template <class T, class Word>
RowFactor packed_rows(const Factor<T>& f, Word* out) {
  using Rules = WordRules<Word>;
  constexpr int W = kLanes<typename Rules::Acc>;
  const int64_t stride = round_up(ceil_div(f.depth, Rules::kDepth), W) + W;
  Rules::pack_by_row(f, out, stride);
  constexpr int64_t kWord = sizeof(Word);
  return {reinterpret_cast<const char*>(out), stride * kWord, kWord, INT32_MAX, 0, false};
}

// A^T lies in rows: A[group of rows][depth][row in the group], which needs no transpose.
template <class T, class Word>
RowFactor packed_columns(const Factor<T>& f, Word* out) {
  using Rules = WordRules<Word>;
  constexpr int kGroup = kPackedRows<typename Rules::Acc>;
  const int64_t group_words = ceil_div(f.depth, Rules::kDepth) * kGroup;
  for (int64_t k = 0; k < f.depth; k += kPackDepth)  // a few rows of A^T at a time, so that each is read in one go
    for (int64_t i = 0; i < f.count; i += kGroup) {
      const Factor<T> part = {f.data + i + k * f.depth_stride, 1, f.depth_stride, min_of(kGroup, f.count - i),
                              min_of(kPackDepth, f.depth - k)};
      Rules::pack_by_depth(part, out + i / kGroup * group_words + k / Rules::kDepth * kGroup, kGroup);
    }
  constexpr int64_t kWord = sizeof(Word);
  return {reinterpret_cast<const char*>(out), kWord, kGroup * kWord, kGroup, group_words * kWord, false};
}

template <class Word, class T>
RowFactor rows_in_place(const Factor<T>& f) {
  constexpr int64_t kElement = sizeof(T), kWord = sizeof(Word);
  return {reinterpret_cast<const char*>(f.data), f.stride * kElement, kWord, INT32_MAX, 0, true};
}

template <class T, class Word>
RowFactor row_factor(const Factor<T>& f, Word* scratch) {
  if (WordRules<Word>::reads_in_place(f)) return rows_in_place<Word>(f);
  return f.stride == 1 ? packed_columns(f, scratch) : packed_rows(f, scratch);
}

// The panel has NV vectors of columns and begins at column j. Register tiles of
// tile_rows(NV) rows, then of 4, 2, 1 for what remains.
template <class Word>
struct PanelRows {
  using Left = RowFactor;

  template <class T>
  static RowFactor prepare(const Factor<T>& f, Word* scratch) {
    return row_factor(f, scratch);
  }

  template <int NV, class Task>
  static void run(Task& task, const RowFactor& left, const Word* right, int64_t stride, int64_t j, int64_t words) {
    constexpr int R = tile_rows(NV);
    int i = 0;
    for (; i + R <= task.rows; i += R) tile<R, NV>(task, left, right, stride, i, j, words);
    rest<(R > 4 ? 4 : R / 2), NV>(task, left, right, stride, i, j, words);
  }

  template <int R, int NV, class Task>
  static void rest(Task& task, const RowFactor& left, const Word* right, int64_t stride, int i, int64_t j,
                   int64_t words) {
    for (; i + R <= task.rows; i += R) tile<R, NV>(task, left, right, stride, i, j, words);
    if constexpr (R > 1) rest<R / 2, NV>(task, left, right, stride, i, j, words);
  }

  // The part of the next tile's rows that lies behind `a`, for an A that streams from memory once.
  template <int R>
  MHA_INLINE void prefetch(const char* a, int64_t row_bytes) {
    constexpr int64_t kBytes = kPrefetchDepth * sizeof(Word);
    for (int r = 0; r < R; ++r, a += row_bytes)
#pragma GCC unroll 8
      for (int64_t line = 0; line < kBytes; line += kCacheLine) __builtin_prefetch(a + line, 0, 2);
  }

  template <int R, int NV, class Task>
  __attribute__((noinline)) static void tile(Task& task, const RowFactor& left, const Word* right, int64_t stride,
                                             int i, int64_t j, int64_t words) {
    task.template prefetch<NV>(i, R, j);
    task.ahead.step(R);
    Vec<typename Task::Acc> sum[R][NV];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) sum[r][v] = Vec<typename Task::Acc>{};
    const char* a = left.row(i);
    const bool streams =
        left.streams && i + 2 * R <= task.rows && task.cols <= kPanelVectors<typename Task::Acc> * Task::W;
    for (int64_t k = 0; k < words; k += kPrefetchDepth) {
      if (streams) prefetch<R>(a + k * left.word_bytes + R * left.row_bytes, left.row_bytes);
      const int64_t here = min_of(kPrefetchDepth, words - k);
      multiply<R, NV>(a + k * left.word_bytes, left.row_bytes, left.word_bytes, right + k * stride, stride, here, sum);
    }
    task.finish(sum, i, j);
  }
};
