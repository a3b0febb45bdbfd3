// Fused forward: for the queries of a panel, block by block of keys,
//   S = K Q^T                      tile of scores, keys x queries
//   m' = max(m, max S)             running row maximum
//   P = e^(S - m')
//   l = l e^(m - m') + sum P       running row sum
//   O = O e^(m - m') + V^T P       running output, transposed
// and at the end O / l. Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao, "FlashAttention",
// 2022. A task takes several panels of one key/value head through the same blocks, so that what has to be packed of a
// block is packed once for all of them.

constexpr int kTaskPanels = 4;
constexpr int kTileRowsAtOnce = 8;  // keys of one Philox block

// Panels of a key/value head, over all query heads that share it, cut into tasks.
struct ForwardSplit {
  int64_t head_panels, panels, parts, entries;

  template <class Acc>
  static ForwardSplit of(const FusedForward& p) {
    ForwardSplit s;
    s.head_panels = PanelSpread::of(p.queries, kLanes<Acc>).panels;
    s.panels = s.head_panels * p.group;
    s.entries = p.batch.count() / max_of(1, p.group);
    const int64_t each = max_of(1, min_of(kTaskPanels, s.panels * s.entries / kTasks));
    s.parts = ceil_div(s.panels, each);
    return s;
  }
  int64_t tasks() const { return entries * parts; }
};

template <class T, class Word>
struct ForwardPanel {
  using Acc = accumulate_t<T>;
  QueryPanel at;
  PanelReach<Acc> reach;
  Logits<T> logits;
  TileDropout<T> dropout;
  Exponential<Acc> exponential;
  Word* query;      // packed: [depth][lane]
  Acc* output;      // [value_dim][lane]
  Acc *max, *sum;   // [lane]
  TileKind kind;    // of the block at hand
  bool first, spoilt;
};

template <class T, class Word>
struct ForwardTask {
  using Acc = accumulate_t<T>;
  using Rules = WordRules<Word>;
  using Panel = ForwardPanel<T, Word>;
  static constexpr int W = kLanes<Acc>;
  static constexpr int kLanesAtMost = kPanelVectors * W;
  static constexpr int kTileStride = kLanesAtMost + Rules::kPanelPadding;
  static constexpr int64_t kRowsPadded = Rules::kDepthMultiple > kTileRowsAtOnce ? Rules::kDepthMultiple
                                                                                  : kTileRowsAtOnce;
  static constexpr Acc kMinusInfinity = Logits<T>::kMinusInfinity;

  const FusedForward& p;
  Panel panels[kTaskPanels];
  int count;
  KeyRange keys{INT64_MAX, 0};  // that any panel looks at
  bool only_finite;             // values that are not finite count as zero, and are added where their weight is not
  Acc* tile;                    // scores, then weights as words
  Acc *block_max, *alpha;
  Word *packed_keys, *packed_values;
  T* finite_values;

  // Panels [first, first + n) of a key/value head.
  ForwardTask(const FusedForward& problem, const ForwardSplit& s, int64_t kv_entry, int64_t first, int64_t n,
              bool only_finite_values)
      : p(problem), count(static_cast<int>(n)), only_finite(only_finite_values) {
    const int64_t query_words = (round_up(ceil_div(p.head_dim, Rules::kDepth), W)) * kTileStride;
    const int64_t output_size = p.value_dim * kLanesAtMost;
    const int64_t key_words = packed_words<Word>(kKeyBlock, p.head_dim);
    const int64_t value_words = packed_words<Word>(p.value_dim, kKeyBlock);
    const int64_t finite_size = only_finite ? kKeyBlock * p.value_dim : 0;
    Room room;
    for (int i = 0; i < 2; ++i) {  // once to add up, once to hand out
      tile = room.take<Acc>((kKeyBlock + kRowsPadded) * kTileStride);
      block_max = room.take<Acc>(kLanesAtMost);
      alpha = room.take<Acc>(kLanesAtMost);
      packed_keys = room.take<Word>(key_words);
      packed_values = room.take<Word>(value_words);
      finite_values = room.take<T>(finite_size);
      for (int n_panel = 0; n_panel < count; ++n_panel) {
        Panel& panel = panels[n_panel];
        panel.query = room.take<Word>(query_words);
        panel.output = room.take<Acc>(output_size);
        panel.max = room.take<Acc>(kLanesAtMost);
        panel.sum = room.take<Acc>(kLanesAtMost);
      }
      room.allocate();
    }
    for (int i = 0; i < count; ++i) {
      const int64_t index = first + i;
      begin_panel(panels[i], kv_entry * p.group + index / s.head_panels, index % s.head_panels);
    }
    keys.begin = keys.begin / kKeyStep * kKeyStep;
  }

  void begin_panel(Panel& panel, int64_t entry, int64_t index) {
    panel.at = query_panel<Acc>(p, entry, index);
    panel.logits = Logits<T>(p, entry);
    panel.reach = PanelReach<Acc>(panel.logits.visibility, panel.at);
    panel.dropout = TileDropout<T>(p, entry);
    panel.exponential = Exponential<Acc>::of(panel.logits.unit);
    panel.first = true;
    panel.spoilt = false;
    const KeyRange range = panel.logits.keys(panel.reach);
    if (range.begin < range.end) keys = {min_of(keys.begin, range.begin), max_of(keys.end, range.end)};
    const Factor<T> queries = rows_of<T>(p, entry, p.query, panel.at.query, panel.at.lanes, p.head_dim);
    Rules::pack_by_depth(queries, panel.query, stride_of(panel));
    const Vec<Acc> sink = splat(p.sinks ? widen(*matrix<const T>(p.batch, entry, p.sinks)) : kMinusInfinity);
    for (int v = 0; v < panel.at.vectors; ++v) {
      store<Acc>(panel.max + v * W, sink);
      store<Acc>(panel.sum + v * W, select<Acc>(sink == kMinusInfinity, Vec<Acc>{}, splat(Acc{1})));
    }
  }

  static int64_t stride_of(const Panel& panel) { return panel.at.vectors * W + Rules::kPanelPadding; }

  void run() {
    for (int64_t key = keys.begin; key < keys.end; key += kKeyBlock) add_block(key, min_of(kKeyBlock, keys.end - key));
    for (int i = 0; i < count; ++i)
      with_vectors(panels[i].at.vectors, [&](auto v) { finish_panel<decltype(v)::count>(panels[i]); });
  }

  void add_block(int64_t key, int64_t n) {
    bool needed = false;
    for (int i = 0; i < count; ++i) {
      Panel& panel = panels[i];
      panel.kind = panel.logits.kind(panel.at, panel.reach, key, n);
      needed |= panel.kind != TileKind::hidden;
    }
    if (!needed) return;
    const int64_t entry = panels[0].at.entry;
    const RowFactor key_rows =
        head_rows<T, Word>(rows_of<T>(p, entry, p.key, key, n, p.head_dim), packed_keys, count);
    Factor<T> values = columns_of<T>(p, entry, p.value, key, n, p.value_dim);
    if (only_finite) values = keep_finite(values, finite_values);
    const RowFactor value_columns = head_columns<T, Word>(values, packed_values, count);
    for (int i = 0; i < count; ++i) {
      if (panels[i].kind == TileKind::hidden) continue;
      with_vectors(panels[i].at.vectors, [&](auto v) {
        add_block_to<decltype(v)::count>(panels[i], key, n, key_rows, value_columns);
      });
    }
  }

  // The part of the block that the panel looks at.
  template <int NV>
  void add_block_to(Panel& panel, int64_t block, int64_t block_size, RowFactor key_rows, RowFactor value_columns) {
    constexpr int64_t kStride = NV * W + Rules::kPanelPadding;
    const KeyRange range = panel.logits.keys(panel.reach);
    const int64_t skipped = max_of(0, range.begin - block) / kKeyStep * kKeyStep;
    const int64_t key = block + skipped, n = min_of(block + block_size, range.end) - key;
    key_rows.base += skipped * key_rows.row_bytes;
    value_columns.base += skipped / Rules::kDepth * value_columns.word_bytes;

    for (int v = 0; v < NV; ++v) store<Acc>(block_max + v * W, splat(kMinusInfinity));
    ScoreSink<Acc> scores{{n, NV * W, tile, kStride}, block_max};
    PanelRows<Word>::template run<NV>(scores, key_rows, panel.query, kStride, 0, ceil_div(p.head_dim, Rules::kDepth));
    if (panel.logits.scaled || panel.kind == TileKind::mixed)
      panel.logits.template apply<NV>(panel.at, panel.reach, panel.kind, tile, kStride, key, n, block_max);

    softmax<NV>(panel, key, n);
    OutputSink<Acc> output{{p.value_dim, NV * W, panel.output, NV * W}, alpha, panel.first};
    const Word* weights = reinterpret_cast<const Word*>(tile);
    PanelRows<Word>::template run<NV>(output, value_columns, weights, kStride, 0, ceil_div(n, Rules::kDepth));
    if (only_finite) add_unbounded<NV>(panel, key, n);
    panel.first = false;
  }

  // Scores to weights, relative to the maximum so far; what was summed before is rescaled to it.
  template <int NV>
  void softmax(Panel& panel, int64_t key, int64_t n) {
    constexpr int64_t kStride = NV * W + Rules::kPanelPadding;
    Vec<Acc> shift[NV], sum[NV];
    for (int v = 0; v < NV; ++v) {
      const Vec<Acc> before = load<Acc>(panel.max + v * W), max = vec_max(load<Acc>(block_max + v * W), before);
      store<Acc>(panel.max + v * W, max);
      // With nothing but -inf in a row any finite shift does: every term is 0.
      shift[v] = select<Acc>(max == kMinusInfinity, Vec<Acc>{}, max);
      const Vec<Acc> factor = panel.exponential.template operator()<Acc>(before - shift[v]);
      store<Acc>(alpha + v * W, factor);
      sum[v] = load<Acc>(panel.sum + v * W) * factor;
    }
    const int64_t padded = round_up(n, kRowsPadded);
    for (int64_t j = n; j < padded; ++j)
      for (int v = 0; v < NV; ++v) store<Acc>(tile + j * kStride + v * W, splat(kMinusInfinity));
    if (panel.dropout.active) exponentials<NV, true>(panel, key, padded, shift, sum);
    else exponentials<NV, false>(panel, key, padded, shift, sum);
    for (int v = 0; v < NV; ++v) store<Acc>(panel.sum + v * W, sum[v]);
  }

  // tile := words of e^(tile - shift), after dropout; sum: before it.
  template <int NV, bool kDropout>
  void exponentials(const Panel& panel, int64_t key, int64_t n, const Vec<Acc> (&shift)[NV], Vec<Acc> (&sum)[NV]) {
    constexpr int64_t kStride = NV * W + Rules::kPanelPadding;
    constexpr int kDepth = Rules::kDepth;
    const Exponential<Acc> exponential = panel.exponential;
    for (int64_t j = 0; j < n; j += kTileRowsAtOnce) {
      DroppedKeys<Acc> dropped[NV];
      if constexpr (kDropout)
        for (int v = 0; v < NV; ++v)
          dropped[v] = panel.dropout.keys(panel.at.query + v * W, (key + j) / kKeysPerBlock);
#pragma GCC unroll 8
      for (int row = 0; row < kTileRowsAtOnce; row += kDepth) {
        Acc* from = tile + (j + row) * kStride;
        Word* to = reinterpret_cast<Word*>(tile) + (j + row) / kDepth * kStride;
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) {
          Vec<Acc> terms[kDepth];
#pragma GCC unroll 2
          for (int i = 0; i < kDepth; ++i) {
            terms[i] = exponential.template operator()<T>(load<Acc>(from + i * kStride + v * W) - shift[v]);
            sum[v] += terms[i];
            if constexpr (kDropout) terms[i] = dropped[v].apply(terms[i], row + i);
          }
          Rules::store_words(to + v * W, terms);
        }
      }
    }
  }

  // "Zero hides": what the product left out, where the weight is not zero.
  template <int NV>
  void add_unbounded(Panel& panel, int64_t key, int64_t n) {
    constexpr int64_t kStride = NV * W + Rules::kPanelPadding;
    const Factor<T> values = columns_of<T>(p, panel.at.entry, p.value, key, n, p.value_dim);
    for (int64_t j = 0; j < n; ++j)
      for (int64_t d = 0; d < p.value_dim; ++d) {
        const T x = values.data[j * values.depth_stride + d * values.stride];
        if (is_finite(x)) continue;
        const Word* weights = reinterpret_cast<const Word*>(tile) + j / Rules::kDepth * kStride;
        for (int v = 0; v < NV; ++v) {
          const Vec<Acc> weight = Rules::load_term(weights + v * W, static_cast<int>(j % Rules::kDepth));
          Acc* out = panel.output + d * NV * W + v * W;
          store<Acc>(out, load<Acc>(out) + select<Acc>(weight == 0, Vec<Acc>{}, weight * widen(x)));
        }
      }
  }

  template <int NV>
  void finish_panel(Panel& panel) {
    if (panel.first) std::memset(panel.output, 0, sizeof(Acc) * static_cast<size_t>(p.value_dim * NV * W));
    const MatrixWriter<T> output(p.batch, panel.at.entry, p.output);
    for (int v = 0; v < NV; ++v) {
      const Vec<Acc> sum = load<Acc>(panel.sum + v * W);
      const Vec<Acc> factor = select<Acc>(sum == 0, Vec<Acc>{}, panel.dropout.keep_scale / sum);
      const int lanes = static_cast<int>(min_of(W, panel.at.lanes - v * W));
      for (int64_t d = 0; d < p.value_dim; d += W) {
        const int size = static_cast<int>(min_of(W, p.value_dim - d));
        panel.spoilt |= write_block(output, panel.at.query + v * W, d, lanes, size,
                                    panel.output + d * NV * W + v * W, NV * W, factor);
      }
      if (p.row_max) write_statistics(panel, v, lanes, sum);
    }
  }

  // W queries x W elements of the head, transposed. Returns whether some are not finite.
  static bool write_block(const MatrixWriter<T>& output, int64_t query, int64_t d, int lanes, int size, const Acc* from,
                          int64_t stride, Vec<Acc> factor) {
    Vec<Acc> r[W] = {}, probe = {};
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i)
      if (i < size) {
        r[i] = load<Acc>(from + i * stride) * factor;
        probe = mul_add(r[i], Vec<Acc>{}, probe);
      }
    transpose(r);
    for (int i = 0; i < lanes; ++i) output.row(query + i).write(d, size, r[i]);
    return !(lane_sum<Acc>(probe) == 0);
  }

  void write_statistics(const Panel& panel, int v, int lanes, Vec<Acc> sum) const {
    const Vec<Acc> max = load<Acc>(panel.max + v * W);
    const MatrixWriter<Acc> maxima(p.batch, panel.at.entry, p.row_max), sums(p.batch, panel.at.entry, p.row_sum);
    for (int i = 0; i < lanes; ++i) {
      *maxima.row(panel.at.query + v * W + i).p = max[i];
      *sums.row(panel.at.query + v * W + i).p = sum[i];
    }
  }
};

template <class T, class Word>
struct FusedForwardOf {
  using Task = ForwardTask<T, Word>;
  using Acc = accumulate_t<T>;

  static int64_t tasks(const FusedForward& p) { return ForwardSplit::of<Acc>(p).tasks(); }

  static void run(const FusedForward& p, int64_t begin, int64_t end) {
    const ForwardSplit s = ForwardSplit::of<Acc>(p);
    const WordSession<Word> session;
    for (int64_t task = begin; task < end; ++task) {
      // Later queries first: with causality they see more keys, and long tasks should not come last.
      const int64_t entry = task / s.parts, part = s.parts - 1 - task % s.parts;
      const int64_t first = s.panels * part / s.parts, count = s.panels * (part + 1) / s.parts - first;
      unsigned spoilt = 0;
      {
        Task forward(p, s, entry, first, count, false);
        forward.run();
        for (int i = 0; i < count; ++i) spoilt |= unsigned{forward.panels[i].spoilt} << i;
      }
      for (int64_t i = 0; i < count; ++i)
        if (spoilt >> i & 1) Task(p, s, entry, first + i, 1, true).run();
    }
  }
};

template <class T>
struct FusedForwardKernel : FusedForwardOf<T, typename FusedWord<T>::type> {};
