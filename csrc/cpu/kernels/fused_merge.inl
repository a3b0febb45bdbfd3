// Keys cut into parts (core/fused_plan.h): each part p of a row leaves its maximum m_p, its sum l_p and its output O_p,
// not yet divided by the sum. Together
//   m = max m_p,   l = sum_p e^(m_p - m) l_p,   O = sum_p e^(m_p - m) O_p / l.

// One part of the keys that a task looks at, in whole steps.
struct KeyPart {
  int64_t index = 0, count = 1;

  bool first() const { return index == 0; }
  KeyRange of(KeyRange all) const {
    if (all.begin >= all.end) return {0, 0};
    const int64_t steps = ceil_div(all.end - all.begin, kKeyStep);
    const int64_t begin = all.begin + steps * index / count * kKeyStep;
    return {begin, min_of(all.end, all.begin + steps * (index + 1) / count * kKeyStep)};
  }
};

// What a part leaves of a row: value_dim elements of output, maximum, sum.
template <class Acc>
struct Partials {
  Acc* first;
  int64_t parts, queries, value_dim;

  explicit Partials(const FusedForward& p)
      : first(static_cast<Acc*>(p.partials)),
        parts(first ? FusedPlan::of(p).parts : 1),
        queries(p.queries),
        value_dim(p.value_dim) {}

  explicit operator bool() const { return first != nullptr; }
  int64_t stride() const { return value_dim + 2; }
  Acc* at(int64_t entry, int64_t query, int64_t part) const {
    return first + ((entry * queries + query) * parts + part) * stride();
  }
  // Output of all queries of an entry.
  MatrixWriter<Acc> output(int64_t entry, int64_t part) const { return {at(entry, 0, part), parts * stride(), 1}; }
  void set_statistics(int64_t entry, int64_t query, int64_t part, Acc max, Acc sum) const {
    Acc* statistics = at(entry, query, part) + value_dim;
    statistics[0] = max;
    statistics[1] = sum;
  }
};

template <class T>
struct MergedRows {
  using Acc = accumulate_t<T>;
  static constexpr int W = kLanes<Acc>;
  static constexpr Acc kMinusInfinity = Logits<T>::kMinusInfinity;

  const Partials<Acc> partials;
  const Exponential<Acc> exponential;
  const Acc keep_scale;
  const int64_t entry;
  const MatrixWriter<T> output;
  const MatrixWriter<Acc> row_max, row_sum;

  MergedRows(const FusedForward& p, int64_t entry_index)
      : partials(p),
        exponential(Exponential<Acc>::of(Logits<T>::unit_of(p))),
        keep_scale(PanelDropout<T>::scale_of_kept(p)),
        entry(entry_index),
        output(p.batch, entry_index, p.output),
        row_max(p.batch, entry_index, p.row_max),
        row_sum(p.batch, entry_index, p.row_sum) {}

  void row(int64_t i) const {
    const Acc* part = partials.at(entry, i, 0);
    const int64_t stride = partials.stride(), value_dim = partials.value_dim;
    Acc max = part[value_dim], sum = 0, factor[FusedPlan::kTasks];
    for (int64_t n = 1; n < partials.parts; ++n) {
      const Acc m = part[n * stride + value_dim];
      if (m > max) max = m;
    }
    const Acc shift = finite_shift<Acc>(splat(max))[0];
    for (int64_t n = 0; n < partials.parts; ++n) {
      factor[n] = exponential.template operator()<Acc>(splat(part[n * stride + value_dim] - shift))[0];
      sum += factor[n] * part[n * stride + value_dim + 1];
    }
    const Vec<Acc> inverse = inverse_sum<Acc>(splat(sum), keep_scale);
    const RowWriter<T> out = output.row(i);
    for (int64_t d = 0; d < value_dim; d += W) {
      const int size = static_cast<int>(min_of(W, value_dim - d));
      Vec<Acc> total = {};
      for (int64_t n = 0; n < partials.parts; ++n) {
        if (factor[n] == 0) continue;  // a part without weight may have met NaN
        const RowReader<Acc> term{part + n * stride + d, 1};
        total = mul_add(splat(factor[n]), term.read(0, size), total);
      }
      out.write(d, size, total * inverse);
    }
    if (row_max.p) {
      *row_max.row(i).p = max;
      *row_sum.row(i).p = sum;
    }
  }
};

template <>
struct RowShape<FusedForward> {
  static int64_t rows(const FusedForward& p) { return p.queries; }
  static int64_t cols(const FusedForward& p) { return FusedPlan::of(p).parts * (p.value_dim + 2); }
};

template <class T>
struct FusedMergeKernel : RowKernel<FusedForward, MergedRows<T>> {
  static int64_t tasks(const FusedForward& p) {
    return p.partials ? RowKernel<FusedForward, MergedRows<T>>::tasks(p) : 0;
  }
};
