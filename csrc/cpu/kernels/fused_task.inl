// What the two ways of the forward (with and without the weights) share: the panels of a task, and the products of a
// block of keys with them. A task takes several panels of one key/value head through the same blocks, so that what has
// to be packed of a block is packed once for all of them.

constexpr int kTaskPanels = 4;
// Tasks that are wanted before panels share one: four each for four threads, as products are cut.
constexpr int64_t kForwardTasks = 16;
// Keys whose scores become logits together, where that takes a pass of its own: 64 x 64 floats stay in the first-level
// cache in between.
constexpr int64_t kLogitKeys = 64;

struct PanelPortion {
  int64_t entry, first, count;
};

// Panels of a key/value head, over all query heads that share it, cut into tasks; and the keys into parts.
struct ForwardSplit {
  int64_t head_panels, panels, parts, entries, key_parts;

  // `group` query heads of each of `entries` are cut together.
  template <class Acc>
  static ForwardSplit of(const FusedForward& p, int64_t group, int64_t entries, int64_t panels_at_most,
                         int64_t key_parts) {
    ForwardSplit s;
    s.key_parts = key_parts;
    s.head_panels = PanelSpread::of<Acc>(p.queries).panels;
    s.panels = s.head_panels * group;
    s.entries = entries;
    const int64_t each = max_of(1, min_of(panels_at_most, s.panels * s.entries / kForwardTasks));
    s.parts = ceil_div(s.panels, each);
    return s;
  }
  int64_t tasks() const { return entries * parts * key_parts; }

  // Of `panels`, those of task `task`, a number among those of the same keys. Later queries come first: with causality
  // they see more keys, and long tasks should not come last.
  PanelPortion portion(int64_t task) const {
    const int64_t part = parts - 1 - task % parts, first = panels * part / parts;
    return {task / parts, first, panels * (part + 1) / parts - first};
  }
};

// What a task takes: panels [first, first + count) of a key/value head, and a part of the keys that they see.
struct ForwardShare {
  int64_t kv_entry, first, count;
  KeyPart part;
  // These very keys: those of a first run, when some of its panels run again. The part is cut from what all panels of a
  // task look at together, so one of them alone would cut it elsewhere.
  const KeyRange* keys = nullptr;
  // In the accumulation type: where WeightsTask adds the weights up instead of writing them.
  void* weight_sums = nullptr;
};

template <class T, class Word>
struct ForwardPanel {
  using Acc = accumulate_t<T>;
  QueryPanel at;
  PanelReach<Acc> reach;
  Logits<T> logits;
  PanelDropout<T> dropout;
  Exponential<Acc> exponential;
  Acc sink;        // -inf: none
  Word* query;     // packed: [depth][lane]
  Acc* output;     // [value_dim][lane]
  Acc *max, *sum;  // [lane]
  TileKind kind;   // of the block at hand
  bool first, spoilt;
};

// The part of a block of keys that one panel looks at.
struct PanelPart {
  int64_t key, n, skipped;  // skipped: keys of the block before it
};

template <class T, class Word>
struct ForwardTask {
  using Acc = accumulate_t<T>;
  using PanelWord = Word;
  using Rules = WordRules<Word>;
  using Panel = ForwardPanel<T, Word>;
  static constexpr int W = kLanes<Acc>;
  static constexpr int kLanesAtMost = kPanelVectors<Acc> * W;
  static constexpr int kStrideAtMost = kLanesAtMost + Rules::kPanelPadding;
  template <int NV>
  static constexpr int64_t kStride = NV * W + Rules::kPanelPadding;  // from one row of a tile to the next
  // Tiles have so many rows that whole Philox blocks and whole words can be read and written.
  static constexpr int kRowStep = Rules::kDepthMultiple > kKeysPerBlock ? Rules::kDepthMultiple : kKeysPerBlock;
  static constexpr Acc kMinusInfinity = Logits<T>::kMinusInfinity;

  const FusedForward& p;
  const Partials<Acc> partials;
  const KeyPart key_part;
  Panel panels[kTaskPanels];
  int count;
  KeyRange keys{INT64_MAX, 0};  // that any panel looks at
  bool only_finite;             // values that are not finite count as zero, and are added where their weight is not
  Acc* tile;                    // kKeyBlock rows: scores, then weights as words
  Acc *block_max, *alpha;
  Acc* extra;
  Word *packed_keys, *packed_values;
  T* finite_values;

  ForwardTask(const FusedForward& problem, const ForwardSplit& s, const ForwardShare& share, bool only_finite_values,
              int64_t extra_size)
      : p(problem),
        partials(problem),
        key_part(share.part),
        count(static_cast<int>(share.count)),
        only_finite(only_finite_values) {
    Room().lay_out([&](Room& room) { take_room(room, extra_size); });
    for (int i = 0; i < count; ++i) {
      const int64_t index = share.first + i;
      begin_panel(panels[i], share.kv_entry * p.group + index / s.head_panels, index % s.head_panels);
    }
    keys.begin = keys.begin / kKeyStep * kKeyStep;
    keys = share.keys ? *share.keys : key_part.of(keys);
  }

  void take_room(Room& room, int64_t extra_size) {
    tile = room.take<Acc>((kKeyBlock + kRowStep) * kStrideAtMost);
    block_max = room.take<Acc>(kLanesAtMost);
    alpha = room.take<Acc>(kLanesAtMost);
    packed_keys = room.take<Word>(packed_words<Word>(kKeyBlock, p.head_dim));
    packed_values = room.take<Word>(packed_words<Word>(p.value_dim, kKeyBlock));
    finite_values = room.take<T>(only_finite ? kKeyBlock * p.value_dim : 0);
    for (int i = 0; i < count; ++i) {
      panels[i].query = room.take<Word>(round_up(ceil_div(p.head_dim, Rules::kDepth), W) * kStrideAtMost);
      panels[i].output = room.take<Acc>(p.value_dim * kLanesAtMost);
      panels[i].max = room.take<Acc>(kLanesAtMost);
      panels[i].sum = room.take<Acc>(kLanesAtMost);
    }
    extra = room.take<Acc>(extra_size);
  }

  void begin_panel(Panel& panel, int64_t entry, int64_t index) {
    panel.at = query_panel<Acc>(p, entry, index);
    panel.logits = Logits<T>(p, entry);
    panel.reach = PanelReach<Acc>(panel.logits.visibility, panel.at);
    panel.dropout = PanelDropout<T>(p, panel.at);
    panel.exponential = Exponential<Acc>::of(panel.logits.unit);
    panel.first = true;
    panel.spoilt = false;
    const KeyRange range = panel.logits.keys(panel.reach);
    if (range.begin < range.end) keys = {min_of(keys.begin, range.begin), max_of(keys.end, range.end)};
    const Factor<T> queries = rows_of<T>(p, entry, p.query, panel.at.query, panel.at.lanes, p.head_dim);
    Rules::pack_by_depth(queries, panel.query, panel.at.vectors * W + Rules::kPanelPadding);
    panel.sink = p.sinks && key_part.first() ? widen(*matrix<const T>(p.batch, entry, p.sinks)) : kMinusInfinity;
    for (int v = 0; v < panel.at.vectors; ++v) {
      store<Acc>(panel.max + v * W, splat(panel.sink));
      store<Acc>(panel.sum + v * W, splat(panel.sink == kMinusInfinity ? Acc{0} : Acc{1}));
    }
  }

  // Whether any panel sees any of the keys; says so in each panel, too.
  bool any_visible(int64_t key, int64_t n) {
    bool any = false;
    for (int i = 0; i < count; ++i) {
      Panel& panel = panels[i];
      panel.kind = panel.logits.kind(panel.at, panel.reach, key, n);
      any |= panel.kind != TileKind::hidden;
    }
    return any;
  }

  RowFactor key_rows(int64_t key, int64_t n) {
    return head_rows<T, Word>(rows_of<T>(p, panels[0].at.entry, p.key, key, n, p.head_dim), packed_keys, count);
  }

  RowFactor value_columns(int64_t key, int64_t n) {
    const Factor<T> values = columns_of<T>(p, panels[0].at.entry, p.value, key, n, p.value_dim);
    return head_columns<T, Word>(only_finite ? keep_finite(values, finite_values) : values, packed_values, count);
  }

  PanelPart part_of(const Panel& panel, int64_t block, int64_t block_size) const {
    const KeyRange range = panel.logits.keys(panel.reach);
    const int64_t skipped = max_of(0, range.begin - block) / kKeyStep * kKeyStep, key = block + skipped;
    return {key, min_of(block + block_size, range.end) - key, skipped};
  }

  // to := logits (or scores, see Logits) of the part; block_max: the largest of each lane.
  template <int NV>
  void score(const Panel& panel, const PanelPart& part, RowFactor rows, Acc* to) {
    rows.base += part.skipped * rows.row_bytes;
    for (int v = 0; v < NV; ++v) store<Acc>(block_max + v * W, splat(kMinusInfinity));
    if (!panel.logits.scaled && panel.kind == TileKind::open) return add_scores<NV>(panel, part.n, rows, {}, to);
    Acc max[kLanesAtMost];  // of the logits; block_max gets that of the scores, which is of no use here
    for (int i = 0; i < NV * W; ++i) max[i] = kMinusInfinity;
    for (int64_t j = 0; j < part.n; j += kLogitKeys) {
      const int64_t key = part.key + j, n = min_of(kLogitKeys, part.n - j);
      add_scores<NV>(panel, n, rows, panel.logits.ahead(panel.at, key, n), to);
      panel.logits.apply(panel.at, panel.reach, panel.kind, to, kStride<NV>, key, n, max);
      rows.base += kLogitKeys * rows.row_bytes;
      to += kLogitKeys * kStride<NV>;
    }
    std::memcpy(block_max, max, sizeof(Acc) * NV * W);
  }

  template <int NV>
  void add_scores(const Panel& panel, int64_t n, const RowFactor& rows, const Prefetcher& ahead, Acc* to) const {
    ScoreSink<Acc> scores{{n, NV * W, to, kStride<NV>}, block_max};
    scores.ahead = ahead.within(n);
    PanelRows<Word>::template run<NV>(scores, rows, panel.query, kStride<NV>, 0, ceil_div(p.head_dim, Rules::kDepth));
  }

  // output := output * alpha + V^T (the words in the tile)
  template <int NV>
  void add_values(Panel& panel, const PanelPart& part, RowFactor columns) {
    columns.base += part.skipped / Rules::kDepth * columns.word_bytes;
    OutputSink<Acc> output{{p.value_dim, NV * W, panel.output, NV * W}, alpha, panel.first};
    const Word* weights = reinterpret_cast<const Word*>(tile);
    if (only_finite && !panel.first) drop_vanishing<NV>(panel);
    PanelRows<Word>::template run<NV>(output, columns, weights, kStride<NV>, 0, ceil_div(part.n, Rules::kDepth));
    if (only_finite) add_unbounded(panel, part.key, part.n);
    panel.first = false;
  }

  // "Zero hides": where what came before has no weight any more, it is gone, and no NaN of it stays.
  template <int NV>
  void drop_vanishing(Panel& panel) const {
    for (int v = 0; v < NV; ++v) {
      const Vec<Acc> factor = load<Acc>(alpha + v * W);
      Acc* out = panel.output + v * W;
      for (int64_t d = 0; d < p.value_dim; ++d, out += NV * W)
        store<Acc>(out, select<Acc>(factor == 0, Vec<Acc>{}, load<Acc>(out)));
    }
  }

  // "Zero hides": what the product left out, where the weight is not zero.
  void add_unbounded(Panel& panel, int64_t key, int64_t n) {
    const int64_t stride = panel.at.vectors * W, word_stride = stride + Rules::kPanelPadding;
    const Factor<T> values = columns_of<T>(p, panel.at.entry, p.value, key, n, p.value_dim);
    for (int64_t j = 0; j < n; ++j)
      for (int64_t d = 0; d < p.value_dim; ++d) {
        const T x = values.data[j * values.depth_stride + d * values.stride];
        if (is_finite(x)) continue;
        const Word* weights = reinterpret_cast<const Word*>(tile) + j / Rules::kDepth * word_stride;
        for (int v = 0; v < panel.at.vectors; ++v) {
          const Vec<Acc> weight = Rules::load_term(weights + v * W, static_cast<int>(j % Rules::kDepth));
          Acc* out = panel.output + d * stride + v * W;
          store<Acc>(out, load<Acc>(out) + select<Acc>(weight == 0, Vec<Acc>{}, weight * widen(x)));
        }
      }
  }

  // The output and the row statistics. `normalised`: the weights were divided by their sum before they were multiplied.
  void finish_panel(Panel& panel, bool normalised) {
    const int64_t stride = panel.at.vectors * W;
    if (panel.first) std::memset(panel.output, 0, sizeof(Acc) * static_cast<size_t>(p.value_dim * stride));
    const MatrixWriter<T> output(p.batch, panel.at.entry, p.output);
    for (int v = 0; v < panel.at.vectors; ++v) {
      const Vec<Acc> sum = load<Acc>(panel.sum + v * W);
      const Vec<Acc> factor = normalised ? splat(Acc{1}) : inverse_sum<Acc>(sum, panel.dropout.keep_scale);
      const int lanes = static_cast<int>(min_of(W, panel.at.lanes - v * W));
      const int64_t query = panel.at.query + v * W;
      for (int64_t d = 0; d < p.value_dim; d += W) {
        const int size = static_cast<int>(min_of(W, p.value_dim - d));
        const Acc* from = panel.output + d * stride + v * W;
        const bool finite = partials ? write_transposed(partials.output(panel.at.entry, key_part.index), query, d,
                                                        lanes, size, from, stride, splat(Acc{1}))
                                     : write_transposed(output, query, d, lanes, size, from, stride, factor);
        panel.spoilt |= !finite;
      }
      const Vec<Acc> max = load<Acc>(panel.max + v * W);
      if (partials) {
        for (int i = 0; i < lanes; ++i)
          partials.set_statistics(panel.at.entry, query + i, key_part.index, max[i], sum[i]);
      } else if (p.row_max) {
        write_statistics(panel.at.entry, query, lanes, max, sum);
      }
    }
  }

  void write_statistics(int64_t entry, int64_t query, int lanes, Vec<Acc> max, Vec<Acc> sum) const {
    const MatrixWriter<Acc> maxima(p.batch, entry, p.row_max), sums(p.batch, entry, p.row_sum);
    for (int i = 0; i < lanes; ++i) {
      *maxima.row(query + i).p = max[i];
      *sums.row(query + i).p = sum[i];
    }
  }
};
