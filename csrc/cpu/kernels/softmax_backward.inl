// Backward of the masked softmax for one query row:
//   delta = sum_j P_j dP_j + p_s dp_s         (s: the sink; terms whose weight is 0 are skipped)
//   dx_j  = P_j (dP_j - delta), 0 for hidden keys
//   dscores_j = dx_j (1 - tanh(scores_j / softcap)^2)
// The second pass finds the row in the cache; meanwhile each pass fetches what the next one needs.

template <class T>
struct SoftmaxBackwardRows {
  using Acc = accumulate_t<T>;
  static constexpr int L = kLanes<Acc>;

  const int64_t cols;
  const bool apply_visibility;
  const BatchVisibility visibility;
  const MatrixReader<T> weights, grad_weights, scores;
  const MatrixReader<Acc> sink_weights, grad_sink_weights;
  const MatrixWriter<T> grad_scores, grad_logits;
  const MatrixWriter<Acc> grad_sink_rows;
  const Acc softcap;

  SoftmaxBackwardRows(const SoftmaxBackward& p, int64_t entry)
      : cols(p.cols),
        apply_visibility(p.apply_visibility),
        visibility(visibility_of(p.apply_visibility ? p.visibility : Visibility{}, p.batch, entry, p.cols)),
        weights(p.batch, entry, p.weights),
        grad_weights(p.batch, entry, p.grad_weights),
        scores(p.batch, entry, p.scores),
        sink_weights(p.batch, entry, p.sink_weights),
        grad_sink_weights(p.batch, entry, p.grad_sink_weights),
        grad_scores(p.batch, entry, p.grad_scores),
        grad_logits(p.batch, entry, p.grad_logits),
        grad_sink_rows(p.batch, entry, p.grad_sink_rows),
        softcap(softcap_in<Acc>(p.softcap)) {}

  void row(int64_t i) const {
    const Acc sink = sink_weights.p ? *sink_weights.row(i).p : 0;
    const Acc sink_grad = grad_sink_weights.p ? *grad_sink_weights.row(i).p : 0;
    Acc delta = weighted_gradients(i);
    if (sink != 0) delta += sink * sink_grad;

    const KeyRange range = visible_keys(visibility, i);
    write_gradients(i, range.begin, range.end - range.begin, delta);
    fill_outside(grad_scores.row(i), range);
    if (grad_logits.p) fill_outside(grad_logits.row(i), range);
    if (grad_sink_rows.p) *grad_sink_rows.row(i).p = sink == 0 ? 0 : sink * (sink_grad - delta);
  }

  // sum_j P_j dP_j over all keys: with a finite mask_value hidden ones have weight too.
  Acc weighted_gradients(int64_t i) const {
    const RowReader<T> w = weights.row(i), g = grad_weights.row(i);
    const RowWriter<T> out = grad_scores.row(i);
    RowSum<Acc> sum;
    int64_t j = 0;
    for (; j + L <= cols; j += L) {
      const Vec<Acc> wj = w.read(j, L);
      sum.add_product(wj, select<Acc>(wj == 0, Vec<Acc>{}, g.read(j, L)));
      out.prefetch(j);
    }
    if (j < cols) {
      const int rest = static_cast<int>(cols - j);
      const Vec<Acc> wj = select<Acc>(first_lanes<Acc>(rest), w.read(j, rest), Vec<Acc>{});
      sum.add_product(wj, select<Acc>(wj == 0, Vec<Acc>{}, g.read(j, rest)));
    }
    return sum.total();
  }

  void fill_outside(const RowWriter<T>& out, KeyRange range) const {
    out.fill(0, range.begin, 0);
    out.fill(range.end, cols, 0);
  }

  struct Operands {
    RowReader<T> w, g, s;
    RowMask<Acc> mask;
    RowWriter<T> ds, dx;
  };

  void write_gradients(int64_t i, int64_t begin, int64_t n, Acc delta) const {
    const Operands row{weights.row(i).from(begin),     grad_weights.row(i).from(begin),
                       scores.row(i).from(begin),      mask_row<Acc>(visibility, i).from(begin),
                       grad_scores.row(i).from(begin), grad_logits.row(i).from(begin)};
    const RowReader<T> next_weights = weights.row(i + 1).from(begin);
    const RowReader<T> next_gradients = grad_weights.row(i + 1).from(begin);
    int64_t j = 0;
    for (; j + L <= n; j += L) {
      write_gradients_at(row, j, L, delta);
      next_weights.prefetch(j);
      next_gradients.prefetch(j);
    }
    if (j < n) write_gradients_at(row, j, static_cast<int>(n - j), delta);
  }

  MHA_INLINE_MEMBER void write_gradients_at(const Operands& row, int64_t j, int n, Acc delta) const {
    const Vec<Acc> zero = {}, w = row.w.read(j, n);
    Vec<Acc> d = select<Acc>(w == 0, zero, w * (row.g.read(j, n) - delta));
    if (row.mask) d = select<Acc>(row.mask.read(j, n), d, zero);
    if (row.dx) row.dx.write(j, n, d);
    // A hidden score may be NaN, so the slope only counts where there is a gradient.
    if (row.s) d = select<Acc>(d == 0, zero, d * tanh_slope<Acc>(row.s.read(j, n) / softcap));
    row.ds.write(j, n, d);
  }
};

template <class T>
using SoftmaxBackwardKernel = RowKernel<SoftmaxBackward, SoftmaxBackwardRows<T>>;
