// C = alpha * sum_g A_g B_g over a batch of strided matrices: scores, weighted sums and their derivatives.

template <class T>
struct ProductKernel {
  using Acc = accumulate_t<T>;

  static int64_t tasks(const Product& p) { return p.batch.count() * p.m; }

  static void run(const Product& p, int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) row(p, task / p.m, task % p.m);
  }

  static void row(const Product& p, int64_t entry, int64_t i) {
    const T* a = matrix<const T>(p.batch, entry, p.a) + i * p.a.row_stride;
    const T* b = matrix<const T>(p.batch, entry, p.b);
    T* c = matrix<T>(p.batch, entry, p.c) + i * p.c.row_stride;
    for (int64_t j = 0; j < p.n; ++j) {
      Acc sum = 0;
      for (int64_t g = 0; g < p.groups; ++g)
        for (int64_t k = 0; k < p.k; ++k) {
          const Acc x = widen(a[g * p.a_group_stride + k * p.a.col_stride]);
          if (p.zero_hides && x == 0) continue;
          sum += x * widen(b[g * p.b_group_stride + k * p.b.row_stride + j * p.b.col_stride]);
        }
      c[j * p.c.col_stride] = narrow<T>(static_cast<Acc>(p.alpha) * sum);
    }
  }
};
