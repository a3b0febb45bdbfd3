// Fused forward for few queries ("decode": one new query against a cache of keys). Lanes are elements of the head, so
// that no lane waits for a query that is not there; a row of scores lies along the keys, as in softmax_forward.inl.
// All query heads of a key/value head go through a block of keys together: keys and values come from memory once.
//   s_j = q . k_j,   m' = max(m, max s),   P = e^(s - m'),   l = l e^(m - m') + sum P,   O = O e^(m - m') + P V
// When the weights are wanted, a block is the whole row, whose sum is then known.

template <class T>
struct DecodeRow {
  using Acc = accumulate_t<T>;
  int64_t entry, query;
  KeyRange range;  // visible by window, causality and length
  RowLogits<T> logits;
  RowDropout<Acc> dropout;
  Acc* factors;  // the query, widened
  Acc* scores;   // of the block, then its weights
  Acc* output;
  Vec<Acc> block_max, sum;
  Acc max;
};

template <class T>
struct DecodeTask {
  using Acc = accumulate_t<T>;
  using Row = DecodeRow<T>;
  static constexpr int W = kLanes<Acc>;
  static constexpr Acc kMinusInfinity = Logits<T>::kMinusInfinity;
  // Elements of the keys of a block: 32 KB of float, so that its values are near when the scores are done.
  static constexpr int64_t kBlockElements = 8192;
  // Keys whose values meet all rows before the next: they stay in the first-level cache.
  static constexpr int64_t kValueStep = 32;
  static constexpr int64_t kAheadBytes = 2048;
  static constexpr int kKeysAtOnce = W < 4 ? W : 4;

  const FusedForward& p;
  const Partials<Acc> partials;
  const KeyPart part;
  const Logits<T> logits;  // of the first query head; scale and what is hidden are the same for all
  const Exponential<Acc> exponential;
  const int64_t first_entry, count;
  const bool drops, only_nonzero;  // only_nonzero: values whose weight is 0 are not looked at
  const int64_t key_size, value_size;
  int64_t block;                // keys
  KeyRange keys{INT64_MAX, 0};  // that any row looks at
  Row* rows;
  Acc* packed;  // keys or values of a block that cannot be read where they are

  DecodeTask(const FusedForward& problem, int64_t kv_entry, KeyPart key_part, bool nonzero)
      : p(problem),
        partials(problem),
        part(key_part),
        logits(problem, kv_entry * problem.group),
        exponential(Exponential<Acc>::of(logits.unit)),
        first_entry(kv_entry * problem.group),
        count(problem.group * problem.queries),
        drops(dropout_threshold(problem.dropout) > 0),
        only_nonzero(nonzero),
        key_size(round_up(problem.head_dim, W)),
        value_size(round_up(problem.value_dim, W)) {
    const int64_t fitting = kBlockElements / max_of(1, max_of(key_size, value_size)) / kKeyStep * kKeyStep;
    block = max_of(kKeyStep, min_of(fitting, kKeyBlock));
    Room().lay_out([&](Room& room) { take_room(room); });
    for (int64_t i = 0; i < count; ++i) begin_row(rows[i], first_entry + i / p.queries, i % p.queries);
    keys.begin = keys.begin / kKeyStep * kKeyStep;
    keys = part.of(keys);
  }

  void take_room(Room& room) {
    rows = room.take<Row>(count);
    packed = room.take<Acc>(block * max_of(key_size, value_size));
    Acc* factors = room.take<Acc>(count * key_size);
    Acc* output = room.take<Acc>(count * value_size);
    const int64_t row_scores = (p.weights ? round_up(p.keys, kKeyStep) + kKeyStep : block) + W;
    Acc* scores = room.take<Acc>(count * row_scores);
    if (!room.there()) return;
    for (int64_t i = 0; i < count; ++i) {
      rows[i].factors = factors + i * key_size;
      rows[i].output = output + i * value_size;
      rows[i].scores = scores + i * row_scores;
    }
  }

  void begin_row(Row& row, int64_t entry, int64_t query) {
    row.entry = entry;
    row.query = query;
    const BatchVisibility visibility = visibility_of(p.visibility, p.batch, entry, p.keys);
    row.range = visible_keys(visibility, query);
    row.logits = {MatrixReader<T>(p.batch, entry, p.bias).row(query), mask_row<Acc>(visibility, query), logits.softcap,
                  logits.hidden};
    row.dropout = RowDropout<Acc>::of(p.dropout, dropout_seed(p.seed), entry, p.heads);
    const Factor<T> factors = rows_of<T>(p, entry, p.query, query, 1, p.head_dim);
    Packer<T>{factors.data, factors.stride, factors.depth_stride, 1, p.head_dim, row.factors, key_size}.run();
    std::memset(row.output, 0, static_cast<size_t>(value_size) * sizeof(Acc));
    row.max = p.sinks && part.first() ? widen(*matrix<const T>(p.batch, entry, p.sinks)) : kMinusInfinity;
    row.sum = Vec<Acc>{};
    if (row.max != kMinusInfinity) row.sum[0] = 1;
    const KeyRange range = logits.hidden_have_weight ? KeyRange{0, p.keys} : row.range;
    if (range.begin < range.end) keys = {min_of(keys.begin, range.begin), max_of(keys.end, range.end)};
  }

  void run() {
    if (p.weights && keys.begin >= keys.end)
      for (int64_t i = 0; i < count; ++i) weights_of(rows[i]).fill(0, p.keys, 0);
    const int64_t span = p.weights ? keys.end - keys.begin : block;
    for (int64_t key = keys.begin; key < keys.end; key += span) {
      const int64_t end = min_of(keys.end, key + span);
      if (!p.weights && !any_visible(key, end - key)) continue;
      for (int64_t i = 0; i < count; ++i) rows[i].block_max = splat(kMinusInfinity);
      for (int64_t j = key; j < end; j += block) score_block(j, min_of(block, end - j), key);
      for (int64_t i = 0; i < count; ++i) softmax(rows[i], key, end - key);
      for (int64_t j = key; j < end; j += block) weigh_block(j, min_of(block, end - j), key);
    }
  }

  bool any_visible(int64_t key, int64_t n) const {
    if (logits.hidden_have_weight) return true;
    for (int64_t i = 0; i < count; ++i) {
      const Row& row = rows[i];
      if (row.range.end <= key || key + n <= row.range.begin) continue;
      if (!row.logits.mask || row.logits.mask.from(key).first(n).any) return true;
    }
    return false;
  }

  // f(data, stride): rows of keys or values [key, key + n) in whole registers.
  template <class F>
  MHA_INLINE_MEMBER void with_rows(const Input& stack, int64_t size, int64_t key, int64_t n, F&& f) const {
    const Factor<T> in = rows_of<T>(p, first_entry, stack, key, n, size);
    const bool whole = in.depth_stride == 1 && size % W == 0;
    // What has to be widened is widened once, if there are several rows to meet it.
    if (whole && (std::is_same_v<T, Acc> || count == 1)) return f(in.data, in.stride);
    const int64_t stride = round_up(size, W);
    Packer<T>{in.data, in.stride, in.depth_stride, n, size, packed, stride}.run();
    f(static_cast<const Acc*>(packed), stride);
  }

  // Fetches the n rows that lie kAheadBytes further on. Rows of float need it not: the processor sees them coming, and
  // the instructions would only take time (f32, decode 1 x 4 heads x 2048 keys x 64 in the third-level cache: 0.89 of
  // what reading alone reaches without, 0.86 with them). 16-bit rows take twice the instructions a byte, so that fewer
  // bytes are under way (bf16, 8 x 12 heads, from memory: 0.72 without, 0.79 with them).
  template <class Word>
  MHA_INLINE_MEMBER static void fetch_ahead(const Word* data, int64_t stride, int64_t n, int64_t size) {
    if constexpr (sizeof(Word) == 2) {
      if (size == 0) return;
      constexpr int64_t kWord = sizeof(Word);
      const char* row = reinterpret_cast<const char*>(data + ceil_div(kAheadBytes, size * kWord) * stride);
      for (int64_t i = 0; i < n; ++i, row += stride * kWord)
        for (int64_t line = 0; line < size * kWord; line += kCacheLine) __builtin_prefetch(row + line);
    }
  }

  void score_block(int64_t j, int64_t n, int64_t key) {
    with_rows(p.key, p.head_dim, j, n, [&](auto* data, int64_t stride) {
      for (int64_t i = 0; i < n; i += W) {
        fetch_ahead(data + i * stride, stride, W, key_size);
        const int present = static_cast<int>(min_of(W, n - i));
        for (int64_t r = 0; r < count; ++r) {
          const Vec<Acc> s = present == W ? dot_products(rows[r].factors, data + i * stride, stride)
                                          : first_dot_products(rows[r].factors, data + i * stride, stride, present);
          take_scores(rows[r], s, j + i, j + i - key, present);
        }
      }
    });
  }

  // Lane i: query . key i.
  template <class Word>
  MHA_INLINE_MEMBER Vec<Acc> dot_products(const Acc* query, const Word* data, int64_t stride) const {
    Vec<Acc> sum[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; i += kKeysAtOnce) dot<kKeysAtOnce>(query, data + i * stride, stride, sum + i);
    return lane_sums(sum);
  }

  template <class Word>
  __attribute__((noinline)) Vec<Acc> first_dot_products(const Acc* query, const Word* data, int64_t stride,
                                                        int n) const {
    Vec<Acc> sum[W] = {};
    for (int i = 0; i < n; ++i) dot<1>(query, data + i * stride, stride, sum + i);
    return lane_sums(sum);
  }

  template <int N, class Word>
  MHA_INLINE_MEMBER void dot(const Acc* query, const Word* data, int64_t stride, Vec<Acc>* out) const {
    Vec<Acc> sum[N] = {};
    for (int64_t d = 0; d < key_size; d += W) {
      const Vec<Acc> q = load<Acc>(query + d);
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i) sum[i] = mul_add(load<Word>(data + i * stride + d), q, sum[i]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) out[i] = sum[i];
  }

  // Scores of keys key .. key+n-1 to logits.
  MHA_INLINE_MEMBER void take_scores(Row& row, Vec<Acc> s, int64_t key, int64_t at, int n) const {
    if (logits.scaled) s *= logits.scale;
    s = row.logits.of(s, key, n);
    if (key < row.range.begin || row.range.end < key + n) {
      const int before = static_cast<int>(clamp_index(row.range.begin - key, W));
      const int end = static_cast<int>(clamp_index(row.range.end - key, W));
      s = select<Acc>(first_lanes<Acc>(end) & ~first_lanes<Acc>(before), s, splat(logits.hidden));
    }
    if (n < W) s = select<Acc>(first_lanes<Acc>(n), s, splat(kMinusInfinity));
    store<Acc>(row.scores + at, s);
    row.block_max = vec_max(s, row.block_max);
  }

  // Logits of n keys to weights, relative to the maximum so far; what was summed before is rescaled to it.
  void softmax(Row& row, int64_t key, int64_t n) const {
    const Acc before = row.max, top = lane_max<Acc>(row.block_max);
    if (top > before) row.max = top;
    const Acc shift = finite_shift<Acc>(splat(row.max))[0];
    rescale(row, exponential.template operator()<Acc>(splat(before - shift)));
    Vec<Acc> sum = row.sum;
    for (int64_t j = 0; j < n; j += W) {
      const Vec<Acc> e = exponential.template operator()<T>(load<Acc>(row.scores + j) - shift);
      store<Acc>(row.scores + j, e);
      sum += e;
    }
    row.sum = sum;
    if (drops)
      row.dropout.row(
          row.query, key, key + n, [&](int64_t j, int) { return load<Acc>(row.scores + (j - key)); },
          [&](int64_t j, int, Vec<Acc> w) { store<Acc>(row.scores + (j - key), w); });
    if (p.weights) write_weights(row, key, n);
  }

  void rescale(Row& row, Vec<Acc> factor) const {
    row.sum *= factor;
    const bool vanishes = factor[0] == 0;  // also what is not finite
    for (int64_t d = 0; d < value_size; d += W)
      store<Acc>(row.output + d, vanishes ? Vec<Acc>{} : load<Acc>(row.output + d) * factor);
  }

  Acc weight_factor(const Row& row) const {
    return inverse_sum<Acc>(splat(lane_sum<Acc>(row.sum)), PanelDropout<T>::scale_of_kept(p))[0];
  }

  RowWriter<T> weights_of(const Row& row) const {
    return MatrixWriter<T>(p.batch, row.entry, p.weights).row(row.query);
  }

  void write_weights(const Row& row, int64_t key, int64_t n) const {
    const RowWriter<T> weights = weights_of(row);
    const auto weight = Normalizer<Acc>::of(splat(weight_factor(row)));
    weights.fill(0, key, 0);
    int64_t j = 0;
    for (; j + W <= n; j += W) weights.write(key + j, W, weight(load<Acc>(row.scores + j)));
    if (j < n) weights.write(key + j, static_cast<int>(n - j), weight(load<Acc>(row.scores + j)));
    weights.fill(key + n, p.keys, 0);
  }

  void weigh_block(int64_t j, int64_t n, int64_t key) {
    with_rows(p.value, p.value_dim, j, n, [&](auto* data, int64_t stride) {
      for (int64_t i = 0; i < n; i += kValueStep) {
        fetch_ahead(data + i * stride, stride, kValueStep, value_size);
        for (int64_t r = 0; r < count; ++r)
          add_values(rows[r].output, rows[r].scores + (j + i - key), data + i * stride, stride,
                     min_of(kValueStep, n - i));
      }
    });
  }

  // output += weights . values
  template <class Word>
  MHA_INLINE_MEMBER void add_values(Acc* output, const Acc* weights, const Word* data, int64_t stride,
                                    int64_t n) const {
    if (only_nonzero) return add_nonzero(output, weights, data, stride, n);
    for (int64_t d = 0; d < value_size; d += kPanelVectors<Acc> * W)
      with_vectors<Acc>(min_of(kPanelVectors<Acc>, (value_size - d) / W),
                        [&](auto v) { add_columns<decltype(v)::count>(output + d, weights, data + d, stride, n); });
  }

  // Sums of every kChains-th key, so that additions need not wait for each other.
  template <int NV, class Word>
  MHA_INLINE_MEMBER static void add_columns(Acc* output, const Acc* weights, const Word* data, int64_t stride,
                                            int64_t n) {
    constexpr int kChains = 4;
    Vec<Acc> sum[kChains][NV] = {};
    int64_t j = 0;
    for (; j + kChains <= n; j += kChains, data += kChains * stride)
#pragma GCC unroll 4
      for (int c = 0; c < kChains; ++c)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v)
          sum[c][v] = mul_add(load<Word>(data + c * stride + v * W), splat(weights[j + c]), sum[c][v]);
    for (; j < n; ++j, data += stride)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) sum[0][v] = mul_add(load<Word>(data + v * W), splat(weights[j]), sum[0][v]);
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v)
      store<Acc>(output + v * W, load<Acc>(output + v * W) + ((sum[0][v] + sum[1][v]) + (sum[2][v] + sum[3][v])));
  }

  // "Zero hides": the same without the values whose weight is zero.
  template <class Word>
  __attribute__((noinline)) void add_nonzero(Acc* output, const Acc* weights, const Word* data, int64_t stride,
                                             int64_t n) const {
    for (int64_t j = 0; j < n; ++j, data += stride) {
      if (weights[j] == 0) continue;
      for (int64_t d = 0; d < value_size; d += W)
        store<Acc>(output + d, mul_add(load<Word>(data + d), splat(weights[j]), load<Acc>(output + d)));
    }
  }

  // Writes the outputs. Returns whether all are finite.
  bool finish() const {
    Vec<Acc> probe = {};
    for (int64_t i = 0; i < count; ++i) {
      const Row& row = rows[i];
      for (int64_t d = 0; d < value_size; d += W) probe = mul_add(load<Acc>(row.output + d), Vec<Acc>{}, probe);
      if (partials) {
        write(partials.output(row.entry, part.index).row(row.query), row, 1);
        partials.set_statistics(row.entry, row.query, part.index, row.max, lane_sum<Acc>(row.sum));
      } else {
        write(MatrixWriter<T>(p.batch, row.entry, p.output).row(row.query), row, weight_factor(row));
      }
    }
    return lane_sum<Acc>(probe) == 0;
  }

  template <class To>
  void write(const RowWriter<To>& out, const Row& row, Acc factor) const {
    int64_t d = 0;
    for (; d + W <= p.value_dim; d += W) out.write(d, W, load<Acc>(row.output + d) * factor);
    if (d < p.value_dim) out.write(d, static_cast<int>(p.value_dim - d), load<Acc>(row.output + d) * factor);
  }
};

template <class T>
struct DecodeForward {
  using Acc = accumulate_t<T>;

  static int64_t tasks(const FusedForward& p) {
    return p.batch.count() * p.queries == 0 ? 0 : p.batch.count() / p.group * Partials<Acc>(p).parts;
  }

  static void run(const FusedForward& p, int64_t begin, int64_t end) {
    const int64_t parts = Partials<Acc>(p).parts;
    for (int64_t task = begin; task < end; ++task)
      if (!finishes(p, task / parts, {task % parts, parts}, false))
        finishes(p, task / parts, {task % parts, parts}, true);
  }

  static bool finishes(const FusedForward& p, int64_t kv_entry, KeyPart part, bool only_nonzero) {
    DecodeTask<T> task(p, kv_entry, part, only_nonzero);
    task.run();
    return task.finish();
  }
};
