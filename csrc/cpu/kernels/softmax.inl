// Masked softmax over the keys of one query row, and its backward.

MHA_INLINE double exponential(double x) { return __builtin_exp(x); }
MHA_INLINE float exponential(float x) { return __builtin_expf(x); }

template <class T>
struct SoftmaxForwardKernel {
  using Acc = accumulate_t<T>;

  static int64_t tasks(const SoftmaxForward& p) { return p.batch.count() * p.rows; }

  static void run(const SoftmaxForward& p, int64_t begin, int64_t end) {
    Acc* x = static_cast<Acc*>(cpu::scratch(sizeof(Acc) * static_cast<size_t>(p.cols + 1)));
    for (int64_t task = begin; task < end; ++task) row(p, task / p.rows, task % p.rows, x);
  }

  static void row(const SoftmaxForward& p, int64_t entry, int64_t i, Acc* x) {
    const BatchVisibility v = visibility_of(p.visibility, p.batch, entry, p.cols);
    const KeyRange range = visible_keys(v, i);
    const T* s = matrix<const T>(p.batch, entry, p.scores) + i * p.scores.row_stride;
    const T* bias = p.bias ? matrix<const T>(p.batch, entry, p.bias) + i * p.bias.row_stride : nullptr;
    T* w = matrix<T>(p.batch, entry, p.weights) + i * p.weights.row_stride;
    const Acc minus_infinity = -__builtin_inf(), cap = static_cast<Acc>(p.softcap);
    const Acc sink = p.sinks ? widen(*matrix<const T>(p.batch, entry, p.sinks)) : minus_infinity;
    Acc max = sink;
    for (int64_t j = 0; j < p.cols; ++j) {
      const bool visible = j >= range.begin && j < range.end &&
                           (!v.mask || v.mask[i * v.mask_row_stride + j * v.mask_col_stride]);
      if (visible) {
        x[j] = widen(s[j * p.scores.col_stride]);
        if (cap != 0) x[j] = cap * static_cast<Acc>(__builtin_tanh(x[j] / cap));
        if (bias) x[j] += widen(bias[j * p.bias.col_stride]);
      } else {
        x[j] = static_cast<Acc>(p.mask_value);
      }
      if (x[j] > max || x[j] != x[j]) max = x[j];
    }
    Acc sum = 0;
    const bool empty = max == minus_infinity;
    for (int64_t j = 0; j < p.cols; ++j) {
      x[j] = empty ? 0 : exponential(x[j] - max);
      sum += x[j];
    }
    const Acc sink_part = empty ? 0 : exponential(sink - max);
    sum += sink_part;
    const Acc inverse = empty ? 0 : 1 / sum;
    for (int64_t j = 0; j < p.cols; ++j) w[j * p.weights.col_stride] = narrow<T>(x[j] * inverse);
    if (p.sink_weights)
      matrix<Acc>(p.batch, entry, p.sink_weights)[i * p.sink_weights.row_stride] = sink_part * inverse;
  }
};

template <class T>
struct SoftmaxBackwardKernel {
  using Acc = accumulate_t<T>;

  static int64_t tasks(const SoftmaxBackward& p) { return p.batch.count() * p.rows; }

  static void run(const SoftmaxBackward& p, int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) row(p, task / p.rows, task % p.rows);
  }

  static void row(const SoftmaxBackward& p, int64_t entry, int64_t i) {
    const T* w = matrix<const T>(p.batch, entry, p.weights) + i * p.weights.row_stride;
    const T* g = matrix<const T>(p.batch, entry, p.grad_weights) + i * p.grad_weights.row_stride;
    const T* s = p.scores ? matrix<const T>(p.batch, entry, p.scores) + i * p.scores.row_stride : nullptr;
    T* ds = matrix<T>(p.batch, entry, p.grad_scores) + i * p.grad_scores.row_stride;
    T* dx = p.grad_logits ? matrix<T>(p.batch, entry, p.grad_logits) + i * p.grad_logits.row_stride : nullptr;
    const BatchVisibility v = visibility_of(p.visibility, p.batch, entry, p.cols);
    const KeyRange range = visible_keys(v, i);
    Acc delta = 0, sink = 0, sink_grad = 0;
    for (int64_t j = 0; j < p.cols; ++j) {
      const Acc wj = widen(w[j * p.weights.col_stride]);
      if (wj != 0) delta += wj * widen(g[j * p.grad_weights.col_stride]);
    }
    if (p.sink_weights) sink = matrix<const Acc>(p.batch, entry, p.sink_weights)[i * p.sink_weights.row_stride];
    if (p.grad_sink_weights)
      sink_grad = matrix<const Acc>(p.batch, entry, p.grad_sink_weights)[i * p.grad_sink_weights.row_stride];
    delta += sink * sink_grad;
    for (int64_t j = 0; j < p.cols; ++j) {
      const Acc wj = widen(w[j * p.weights.col_stride]);
      const bool hidden = p.apply_visibility &&
                          !(j >= range.begin && j < range.end &&
                            (!v.mask || v.mask[i * v.mask_row_stride + j * v.mask_col_stride]));
      const Acc d = wj == 0 || hidden ? 0 : wj * (widen(g[j * p.grad_weights.col_stride]) - delta);
      if (dx) dx[j * p.grad_logits.col_stride] = narrow<T>(d);
      Acc slope = 1;
      if (s && d != 0) {
        const Acc t = static_cast<Acc>(__builtin_tanh(widen(s[j * p.scores.col_stride]) / static_cast<Acc>(p.softcap)));
        slope = 1 - t * t;
      }
      ds[j * p.grad_scores.col_stride] = narrow<T>(d * slope);
    }
    if (p.grad_sink_rows)
      matrix<Acc>(p.batch, entry, p.grad_sink_rows)[i * p.grad_sink_rows.row_stride] = sink * (sink_grad - delta);
  }
};
