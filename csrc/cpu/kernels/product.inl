// C = alpha * sum_g A_g B_g over a batch of strided matrices: scores, weighted sums and their derivatives.
//
// A task computes rows x cols of one C. Per block of the depth, the columns go panel by panel: a panel of B (up to
// kPanelVectors vectors wide, in place or packed) meets all rows of A, tile by tile.

template <class T, class Word>
struct ProductTask : ProductOutput<T, Word> {
  using Output = ProductOutput<T, Word>;
  using Output::W, Output::p, Output::rows, Output::cols, Output::row0, Output::col0;
  using typename Output::Acc;
  using typename Output::Rules;
  using Rows = PanelRows<Word>;

  int64_t depth_block, depth_blocks;
  Prefetcher ahead;  // of B: moves on by a line for every row of A (f32 scores +8 %, bfloat16 +10 %)
  Word* packed_a;
  Word* packed_b;
  T* finite_b = nullptr;  // room for a block of B whose NaN and infinities count as zero; null: B counts as it is

  ProductTask(const Product& problem, const ProductSplit& s, int64_t task, bool only_finite_b)
      : Output(problem, s, task), depth_block(s.depth_block), depth_blocks(s.depth_blocks) {
    const int64_t words = round_up(ceil_div(depth_block, Rules::kDepth), W) + W;  // + W: see RowFactor
    const int64_t a_bytes = round_up(rows, kPackedRows<Acc>) * words * static_cast<int64_t>(sizeof(Word));
    const int64_t b_bytes =
        (kPanelVectors<Acc> * W + Rules::kPanelPadding) * words * static_cast<int64_t>(sizeof(Word));
    const bool sums = depth_blocks * p.groups > 1;
    if (sums) this->partial_stride = round_up(cols, W);
    const int64_t partial_bytes = rows * this->partial_stride * static_cast<int64_t>(sizeof(Acc));
    const int64_t finite_bytes = only_finite_b ? depth_block * cols * static_cast<int64_t>(sizeof(T)) : 0;
    char* memory = static_cast<char*>(scratch(b_bytes + a_bytes + partial_bytes + finite_bytes));
    packed_b = reinterpret_cast<Word*>(memory);
    packed_a = reinterpret_cast<Word*>(memory + b_bytes);
    if (sums) this->partial = reinterpret_cast<Acc*>(memory + b_bytes + a_bytes);
    if (only_finite_b) finite_b = reinterpret_cast<T*>(memory + b_bytes + a_bytes + partial_bytes);
  }

  void run() {
    if (p.groups * p.k == 0) return store_empty_sums();
    for (int64_t g = 0; g < p.groups; ++g)
      for (int64_t block = 0; block < depth_blocks; ++block) {
        this->first = g == 0 && block == 0;
        this->last = g == p.groups - 1 && block == depth_blocks - 1;
        const int64_t k0 = block * depth_block;
        add_block(g, k0, min_of(depth_block, p.k - k0));
      }
  }

  // The factors of an empty sum may have no memory at all.
  void store_empty_sums() const {
    const T zero = narrow<T>(to_finite<Acc>(p.alpha) * 0);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < cols; ++j) *this->at(i, j) = zero;
  }

  void add_block(int64_t g, int64_t k0, int64_t depth) {
    const Factor<T> rows_of_a = {this->a + g * p.a_group_stride + row0 * p.a.row_stride + k0 * p.a.col_stride,
                                 p.a.row_stride, p.a.col_stride, rows, depth};
    const Factor<T> b_block = columns_of_b(g, k0, depth);
    const auto left = Rows::prepare(rows_of_a, packed_a);
    const PanelSpread spread = PanelSpread::of<Acc>(cols);
    for (int64_t panel = 0; panel < spread.panels; ++panel) {
      const int64_t end = spread.first_vector(panel + 1), j = spread.first_vector(panel) * W;
      ahead = end * W < cols ? Prefetcher::of(panel_of(b_block, spread, panel + 1)) : Prefetcher{};
      const Factor<T> columns = panel_of(b_block, spread, panel);
      with_vectors<Acc>(end - spread.first_vector(panel),
                        [&](auto v) { add_panel<decltype(v)::count>(left, columns, j); });
    }
  }

  Factor<T> panel_of(const Factor<T>& b_block, const PanelSpread& spread, int64_t panel) const {
    const int64_t j = spread.first_vector(panel) * W, end = min_of(spread.first_vector(panel + 1) * W, cols);
    return {b_block.data + j * b_block.stride, b_block.stride, b_block.depth_stride, end - j, b_block.depth};
  }

  Factor<T> columns_of_b(int64_t g, int64_t k0, int64_t depth) const {
    const T* from = this->b + g * p.b_group_stride + k0 * p.b.row_stride + col0 * p.b.col_stride;
    const Factor<T> columns = {from, p.b.col_stride, p.b.row_stride, cols, depth};
    return finite_b ? keep_finite(columns, finite_b) : columns;
  }

  template <int NV>
  void add_panel(const typename Rows::Left& left, const Factor<T>& columns, int64_t j) {
    const int64_t words = ceil_div(columns.depth, Rules::kDepth);
    if constexpr (std::is_same_v<T, Word>) {
      if (columns.stride == 1 && columns.count == NV * W)
        return Rows::template run<NV>(*this, left, columns.data, columns.depth_stride, j, words);
    }
    constexpr int kStride = NV * W + Rules::kPanelPadding;
    Rules::pack_by_depth(columns, packed_b, kStride);
    Rows::template run<NV>(*this, left, packed_b, kStride, j, words);
  }
};

// "Zero hides": a term whose factor of A is zero counts as zero, whatever B holds. The plain product makes NaN of it
// (0 * NaN), which shows in its result. Only then is the task done again, with NaN and infinities of B taken as zero
// (so that hidden ones leave no trace: every bit is that of a finite B), and what is visible of them added at the end.
template <class T, class Word>
struct VisibleProduct : ProductTask<T, Word> {
  using Task = ProductTask<T, Word>;
  using Task::p, Task::rows, Task::cols, Task::row0, Task::col0;
  using typename Task::Acc;

  int64_t not_nan;  // elements of the result that are not NaN

  VisibleProduct(const Product& problem, const ProductSplit& s, int64_t task)
      : Task(problem, s, task, true), not_nan(rows * cols) {}

  void run() {
    Task::run();
    for (int64_t g = 0; g < p.groups; ++g)
      for (int64_t k = 0; k < p.k && not_nan > 0; ++k) {
        const T* from = this->b + g * p.b_group_stride + k * p.b.row_stride + col0 * p.b.col_stride;
        bool finite = true;
        for (int64_t j = 0; j < cols; ++j) finite &= is_finite(from[j * p.b.col_stride]);
        if (!finite) add_visible(this->a + g * p.a_group_stride + row0 * p.a.row_stride + k * p.a.col_stride, from);
      }
  }

  // One column of A, one row of B.
  void add_visible(const T* a_column, const T* b_row) {
    for (int64_t i = 0; i < rows; ++i) {
      const Acc weight = widen(a_column[i * p.a.row_stride]);
      if (weight == 0) continue;
      for (int64_t j = 0; j < cols; ++j) {
        const T x = b_row[j * p.b.col_stride];
        const Acc before = widen(*this->at(i, j));
        if (is_finite(x) || before != before) continue;
        const Acc after = before + to_finite<Acc>(p.alpha) * (weight * widen(x));
        *this->at(i, j) = narrow<T>(after);
        not_nan -= after != after;
      }
    }
  }
};

// While it lives, products of these words may be computed. Ends also when scratch() throws.
template <class Word>
struct WordSession {
  WordSession() { WordRules<Word>::begin(); }
  ~WordSession() { WordRules<Word>::end(); }
};

// The kernel of elements T that are multiplied as words of the given type.
template <class T, class Word>
struct ProductOf {
  using Rules = WordRules<Word>;

  static int64_t tasks(const Product& p) {
    return p.batch.count() * ProductSplit::of(p, Rules::kDepthBlock).in_entry();
  }

  static void run(const Product& p, int64_t begin, int64_t end) {
    const ProductSplit s = ProductSplit::of(p, Rules::kDepthBlock);
    const WordSession<Word> session;
    for (int64_t task = begin; task < end; ++task) {
      ProductTask<T, Word> product(p, s, task, false);
      product.run();
      if (product.spoilt()) VisibleProduct<T, Word>(p, s, task).run();
    }
    if (bypasses_caches<T>(p.batch, p.m, p.n, p.c)) stream_fence();
  }
};

template <class T>
struct ProductKernel : ProductOf<T, accumulate_t<T>> {};
