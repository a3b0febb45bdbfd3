// out = weights * keep / (1 - p); keep from the position alone (core/philox.h).

template <class T>
struct DropoutKernel {
  using Acc = accumulate_t<T>;

  static int64_t tasks(const Dropout& p) { return p.batch.count() * p.rows; }

  static void run(const Dropout& p, int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) row(p, task / p.rows, task % p.rows);
  }

  static void row(const Dropout& p, int64_t entry, int64_t i) {
    const T* w = matrix<const T>(p.batch, entry, p.weights) + i * p.weights.row_stride;
    T* out = matrix<T>(p.batch, entry, p.out) + i * p.out.row_stride;
    const int64_t heads = p.batch.size[p.batch.ndim - 1];
    const uint32_t head = static_cast<uint32_t>(entry % heads), batch = static_cast<uint32_t>(entry / heads);
    const uint32_t threshold = dropout_threshold(p.p);
    const Acc keep_scale = static_cast<Acc>(1 / (1 - p.p));
    for (int64_t j = 0; j < p.cols; ++j) {
      const PhiloxBlock block = dropout_block(p.seed, batch, head, static_cast<uint32_t>(i),
                                              static_cast<uint32_t>(j / kKeysPerBlock));
      const bool keep = dropout_field(block, static_cast<int>(j % kKeysPerBlock)) >= threshold;
      out[j * p.out.col_stride] = narrow<T>(keep ? widen(w[j * p.weights.col_stride]) * keep_scale : Acc(0));
    }
  }
};
