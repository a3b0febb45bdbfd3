// The first phase of the fused backward, for one query row:
//   delta = sum_j P_j dP_j = dO . O + sum_j W_j dW_j       W: the returned weights; terms whose O or W is 0 are skipped
//   dsink = -p_s delta,  p_s = e^(sink - m) / l
// With it the kernels that follow get by without a row of P and dP in one place. Where W was not kept,
// fused_delta_tiles.inl does the same.

template <>
struct RowShape<FusedBackward> {
  static int64_t rows(const FusedBackward& p) { return p.queries; }
  static int64_t cols(const FusedBackward& p) { return 2 * p.value_dim + (p.grad_weights ? 2 * p.keys : 0); }
};

template <class T>
struct FusedDeltaRows {
  using Acc = accumulate_t<T>;
  static constexpr int L = kLanes<Acc>;

  const int64_t value_dim, keys;
  const MatrixReader<T> output, grad_output, weights, grad_weights;
  const MatrixReader<Acc> row_max, row_sum;
  const MatrixWriter<Acc> delta, grad_sink_rows;
  const Acc sink;

  FusedDeltaRows(const FusedBackward& p, int64_t entry)
      : value_dim(p.value_dim),
        keys(p.keys),
        output(p.batch, entry, p.output),
        grad_output(p.batch, entry, p.grad_output),
        weights(p.batch, entry, p.weights),
        grad_weights(p.batch, entry, p.grad_weights),
        row_max(p.batch, entry, p.row_max),
        row_sum(p.batch, entry, p.row_sum),
        delta(p.batch, entry, p.delta),
        grad_sink_rows(p.batch, entry, p.grad_sink_rows),
        sink(p.sinks ? widen(*matrix<const T>(p.batch, entry, p.sinks)) : Acc{0}) {}

  void row(int64_t i) const {
    Acc sum = product(output.row(i), grad_output.row(i), value_dim);
    if (grad_weights) sum += product(weights.row(i), grad_weights.row(i), keys);
    write(i, sum);
  }

  void write(int64_t i, Acc sum) const {
    *delta.row(i).p = sum;
    if (!grad_sink_rows.p) return;
    const Acc l = *row_sum.row(i).p;
    const Acc weight = l == 0 ? 0 : exp_nonpositive_scalar<Acc>(sink - *row_max.row(i).p) / l;
    *grad_sink_rows.row(i).p = weight == 0 ? 0 : -weight * sum;
  }

  // Where a is 0 the term is, whatever b holds.
  static Acc product(const RowReader<T>& a, const RowReader<T>& b, int64_t n) {
    RowSum<Acc> sum;
    int64_t j = 0;
    for (; j + L <= n; j += L) {
      const Vec<Acc> x = a.read(j, L);
      sum.add_product(x, select<Acc>(x == 0, Vec<Acc>{}, b.read(j, L)));
    }
    if (j < n) {
      const int rest = static_cast<int>(n - j);
      const Vec<Acc> x = select<Acc>(first_lanes<Acc>(rest), a.read(j, rest), Vec<Acc>{});
      sum.add_product(x, select<Acc>(x == 0, Vec<Acc>{}, b.read(j, rest)));
    }
    return sum.total();
  }
};

template <class T>
using FusedDeltaKernel = RowKernel<FusedBackward, FusedDeltaRows<T>>;
