// Masked softmax of one query row:
//   x_j = softcap tanh(scores_j / softcap) + bias_j for visible keys, mask_value for hidden ones
//   P_j = e^(x_j - m) / (sum_k e^(x_k - m) + e^(sink - m)),  m = max(x, sink)
// The row comes from memory once, stays widened in scratch, and goes back once. Keys outside the row's visible range
// are not looked at: all of them have the same weight.

template <class T>
struct SoftmaxForwardRows {
  using Acc = accumulate_t<T>;
  static constexpr int L = kLanes<Acc>;
  static constexpr Acc kMinusInfinity = -static_cast<Acc>(__builtin_inf());

  const int64_t cols;
  const BatchVisibility visibility;
  const MatrixReader<T> scores, bias;
  const MatrixWriter<T> weights;
  const MatrixWriter<Acc> sink_weights;
  const Acc sink, hidden, softcap;
  Acc* const x;  // the visible range of the row, padded with -inf to whole registers

  SoftmaxForwardRows(const SoftmaxForward& p, int64_t entry)
      : cols(p.cols),
        visibility(visibility_of(p.visibility, p.batch, entry, p.cols)),
        scores(p.batch, entry, p.scores),
        bias(p.batch, entry, p.bias),
        weights(p.batch, entry, p.weights),
        sink_weights(p.batch, entry, p.sink_weights),
        sink(p.sinks ? widen(*matrix<const T>(p.batch, entry, p.sinks)) : kMinusInfinity),
        hidden(to_finite<Acc>(p.mask_value)),
        softcap(softcap_in<Acc>(p.softcap)),
        x(static_cast<Acc*>(scratch(sizeof(Acc) * static_cast<size_t>(p.cols + L)))) {}

  void row(int64_t i) const {
    const KeyRange range = visible_keys(visibility, i);
    const int64_t n = range.end - range.begin, outside = cols - n;
    Acc max = logits(i, range.begin, n);
    if (outside && hidden > max) max = hidden;
    if (sink > max) max = sink;
    // With nothing but -inf in the row any finite value does: every term becomes 0, and so does the row.
    if (max == kMinusInfinity) max = 0;

    const Acc outside_term = outside ? exp_nonpositive_scalar<Acc>(hidden - max) : 0;
    const Acc sink_term = sink == kMinusInfinity ? 0 : exp_nonpositive_scalar<Acc>(sink - max);
    const RowWriter<T> out = weights.row(i);
    const Acc visible_sum = exponentials(n, max, scores.row(i + 1).from(range.begin), out.from(range.begin));
    const Acc sum = visible_sum + static_cast<Acc>(outside) * outside_term + sink_term;
    const auto weight = Normalizer<Acc>::of(splat(sum == 0 ? 0 : 1 / sum));

    const Acc outside_weight = weight(splat(outside_term))[0];
    out.fill(0, range.begin, outside_weight);
    write(out.from(range.begin), n, weight);
    out.fill(range.end, cols, outside_weight);
    if (sink_weights.p) *sink_weights.row(i).p = weight(splat(sink_term))[0];
  }

  // x_j of the n keys from `begin` on, into scratch. Returns their maximum, NaNs left aside: they show in the sum.
  Acc logits(int64_t i, int64_t begin, int64_t n) const {
    const RowReader<T> s = scores.row(i).from(begin);
    const RowLogits<T> logits{bias.row(i).from(begin), mask_row<Acc>(visibility, i).from(begin), softcap, hidden};
    Vec<Acc> max = splat(kMinusInfinity);
    int64_t j = 0;
    for (; j + L <= n; j += L) {
      const Vec<Acc> v = logits.of(s.read(j, L), j, L);
      store<Acc>(x + j, v);
      max = vec_max(v, max);
    }
    if (j < n) {
      const int rest = static_cast<int>(n - j);
      const Vec<Acc> v =
          select<Acc>(first_lanes<Acc>(rest), logits.of(s.read(j, rest), j, rest), splat(kMinusInfinity));
      store<Acc>(x + j, v);
      max = vec_max(v, max);
    }
    return lane_max<Acc>(max);
  }

  // x := e^(x - max). Returns the sum. Memory would be idle meanwhile, so it fetches what comes next.
  Acc exponentials(int64_t n, Acc max, const RowReader<T>& next_scores, const RowWriter<T>& out) const {
    RowSum<Acc> sum;
    for (int64_t j = 0; j < n; j += L) {
      const Vec<Acc> e = exp_nonpositive<Acc>(load<Acc>(x + j) - max);
      store<Acc>(x + j, e);
      sum.add(e);
      next_scores.prefetch(j);
      out.prefetch(j);
    }
    return sum.total();
  }

  void write(const RowWriter<T>& out, int64_t n, const Normalizer<Acc>& weight) const {
    int64_t j = 0;
    for (; j + L <= n; j += L) out.write(j, L, weight(load<Acc>(x + j)));
    if (j < n) out.write(j, static_cast<int>(n - j), weight(load<Acc>(x + j)));
  }
};

template <class T>
using SoftmaxForwardKernel = RowKernel<SoftmaxForward, SoftmaxForwardRows<T>>;
