// What the row kernels share: reading and writing one row through its stride, a register at a time, and cutting the
// rows of all matrices into tasks.

// Lanes 0..n-1 true.
template <class T>
MHA_INLINE VecMask<T> first_lanes(int n) {
  VecMask<T> lane = {};
  for (int i = 0; i < kLanes<T>; ++i) lane[i] = i;
  return lane < n;
}

// p[j * stride] for j = 0, 1, ..., widened. Stride 0 is a value broadcast along the row.
template <class T>
struct RowReader {
  using Acc = accumulate_t<T>;
  const T* p;
  int64_t stride;

  explicit operator bool() const { return p != nullptr; }
  MHA_INLINE_MEMBER RowReader from(int64_t j) const { return {p ? p + j * stride : nullptr, stride}; }

  MHA_INLINE_MEMBER void prefetch(int64_t j) const { __builtin_prefetch(p + j * stride); }

  // Elements j .. j+n-1; the other lanes hold anything.
  MHA_INLINE_MEMBER Vec<Acc> read(int64_t j, int n) const {
    if (stride == 1 && n == kLanes<Acc>) return load<T>(p + j);
    if (stride == 0) return splat<Acc>(widen(*p));
    return gather(j, n);
  }

  // Out of line: the end of a row, and rows whose elements are apart.
  __attribute__((noinline)) Vec<Acc> gather(int64_t j, int n) const {
    if (stride == 1) return load_first<T>(p + j, n);
    Acc lanes[kLanes<Acc>] = {};
    for (int i = 0; i < n; ++i) lanes[i] = widen(p[(j + i) * stride]);
    return load<Acc>(lanes);
  }
};

template <class T>
struct RowWriter {
  using Acc = accumulate_t<T>;
  T* p;
  int64_t stride;

  explicit operator bool() const { return p != nullptr; }
  MHA_INLINE_MEMBER RowWriter from(int64_t j) const { return {p ? p + j * stride : nullptr, stride}; }

  MHA_INLINE_MEMBER void prefetch(int64_t j) const { __builtin_prefetch(p + j * stride, 1); }

  MHA_INLINE_MEMBER void write(int64_t j, int n, Vec<Acc> v) const {
    if (stride == 1 && n == kLanes<Acc>) store<T>(p + j, v);
    else scatter(j, n, v);
  }

  __attribute__((noinline)) void scatter(int64_t j, int n, Vec<Acc> v) const {
    if (stride == 1) return store_first<T>(p + j, v, n);
    Acc lanes[kLanes<Acc>];
    store<Acc>(lanes, v);
    for (int i = 0; i < n; ++i) p[(j + i) * stride] = narrow<T>(lanes[i]);
  }

  __attribute__((noinline)) void fill(int64_t begin, int64_t end, Acc value) const {
    const Vec<Acc> v = splat<Acc>(value);
    int64_t j = begin;
    for (; j + kLanes<Acc> <= end; j += kLanes<Acc>) write(j, kLanes<Acc>, v);
    if (j < end) write(j, static_cast<int>(end - j), v);
  }
};

// The boolean mask of a row, read as bytes: any non-zero byte is true.
template <class Acc>
struct RowMask {
  const uint8_t* p;
  int64_t stride;

  explicit operator bool() const { return p != nullptr; }
  MHA_INLINE_MEMBER RowMask from(int64_t j) const { return {p ? p + j * stride : nullptr, stride}; }

  MHA_INLINE_MEMBER VecMask<Acc> read(int64_t j, int n) const {
    if (stride != 1 || n != kLanes<Acc>) return gather(j, n);
    return widen_integers<Acc>(p + j) != 0;
  }

  __attribute__((noinline)) VecMask<Acc> gather(int64_t j, int n) const {
    VecMask<Acc> lanes = {};
    for (int i = 0; i < n; ++i) lanes[i] = p[(j + i) * stride];
    return lanes != 0;
  }

  // Bit i: key j + i is visible, for n <= 32 keys.
  static constexpr int kBits = 32;
  MHA_INLINE_MEMBER uint32_t bits(int64_t j, int n) const {
    return stride == 1 && n == kBits ? nonzero_bits(p + j) : gather_bits(j, n);
  }
  __attribute__((noinline)) uint32_t gather_bits(int64_t j, int n) const {
    uint32_t bits = 0;
    for (int i = 0; i < n; ++i) bits |= uint32_t{p[(j + i) * stride] != 0} << i;
    return bits;
  }

  struct Summary {
    bool any, all;  // of the keys are visible
  };
  Summary first(int64_t n) const {
    Summary keys{false, true};
    for (int64_t j = 0; j < n; j += kBits) {
      const int count = static_cast<int>(min_of(kBits, n - j));
      const uint32_t seen = bits(j, count);
      keys.any |= seen != 0;
      keys.all &= seen == ~uint32_t{0} >> (kBits - count);
    }
    return keys;
  }
};

// From the scores of a row to its logits: x = softcap * tanh(s / softcap) + bias, and what the mask hides gets
// `hidden`.
template <class T>
struct RowLogits {
  using Acc = accumulate_t<T>;
  RowReader<T> bias;
  RowMask<Acc> mask;
  Acc softcap, hidden;

  MHA_INLINE_MEMBER Vec<Acc> of(Vec<Acc> s, int64_t j, int n) const {
    if (softcap != 0) s = softcap * vec_tanh<Acc>(s / softcap);
    if (bias) s += bias.read(j, n);
    if (mask) s = select<Acc>(mask.read(j, n), s, splat(hidden));
    return s;
  }
};

// The matrix of one batch entry, row by row. An absent one (null) has absent rows.
template <class T>
struct MatrixReader {
  const T* p = nullptr;
  int64_t row_stride = 0, col_stride = 0;

  MatrixReader() = default;
  MatrixReader(const BatchShape& batch, int64_t entry, const Input& stack)
      : p(stack ? matrix<const T>(batch, entry, stack) : nullptr),
        row_stride(stack.row_stride),
        col_stride(stack.col_stride) {}
  explicit operator bool() const { return p != nullptr; }
  MHA_INLINE_MEMBER RowReader<T> row(int64_t i) const { return {p ? p + i * row_stride : nullptr, col_stride}; }
};

template <class T>
struct MatrixWriter {
  T* p;
  int64_t row_stride, col_stride;

  MatrixWriter(T* first, int64_t row, int64_t col) : p(first), row_stride(row), col_stride(col) {}
  MatrixWriter(const BatchShape& batch, int64_t entry, const Output& stack)
      : p(stack ? matrix<T>(batch, entry, stack) : nullptr),
        row_stride(stack.row_stride),
        col_stride(stack.col_stride) {}
  MHA_INLINE_MEMBER RowWriter<T> row(int64_t i) const { return {p ? p + i * row_stride : nullptr, col_stride}; }
};

template <class Acc>
MHA_INLINE RowMask<Acc> mask_row(const BatchVisibility& v, int64_t i) {
  return {v.mask ? v.mask + i * v.mask_row_stride : nullptr, v.mask_col_stride};
}

// Adds terms a register at a time in two levels: a lane's first-level sum holds kTerms terms, so n terms round about
// kTerms + n / kTerms times in a row instead of n times. 64 makes that least for 4096 terms a lane.
template <class Acc>
struct RowSum {
  static constexpr int kTerms = 64;
  Vec<Acc> inner = {}, outer = {};
  int terms = 0;

  MHA_INLINE_MEMBER void end_term() {
    if (++terms == kTerms) {
      outer += inner;
      inner = Vec<Acc>{};
      terms = 0;
    }
  }
  MHA_INLINE_MEMBER void add(Vec<Acc> a) {
    inner += a;
    end_term();
  }
  MHA_INLINE_MEMBER void add_product(Vec<Acc> a, Vec<Acc> b) {
    inner = mul_add(a, b, inner);
    end_term();
  }
  MHA_INLINE_MEMBER Acc total() const { return lane_sum<Acc>(outer + inner); }
};

// How many rows an entry of a problem has, and how long they are.
template <class Problem>
struct RowShape {
  static int64_t rows(const Problem& p) { return p.rows; }
  static int64_t cols(const Problem& p) { return p.cols; }
};

// A kernel whose rows are independent. Rows holds what belongs to one batch entry: Rows(problem, entry), then row(i).
// A task is a block of neighbouring rows over all entries.
template <class Problem, class Rows>
struct RowKernel {
  using Shape = RowShape<Problem>;
  // Elements of a task: some microseconds of work, and its rows' data still fits the first-level caches.
  static constexpr int64_t kTaskElements = 16384;

  static int64_t rows_per_task(const Problem& p) { return max_of(1, kTaskElements / max_of(1, Shape::cols(p))); }
  static int64_t tasks(const Problem& p) { return ceil_div(p.batch.count() * Shape::rows(p), rows_per_task(p)); }

  static void run(const Problem& p, int64_t begin, int64_t end) {
    const int64_t per_task = rows_per_task(p);
    const int64_t in_entry = Shape::rows(p), last = min_of(end * per_task, p.batch.count() * in_entry);
    for (int64_t row = begin * per_task; row < last;) {
      const int64_t entry = row / in_entry, first = row % in_entry, count = min_of(in_entry - first, last - row);
      Rows rows(p, entry);
      for (int64_t i = first; i < first + count; ++i) rows.row(i);
      row += count;
    }
  }
};
