// Fused forward that also returns the weights. The scores of a panel stay in the cache for all keys, so that one pass
// over keys and values does
//   S = K Q^T for every block;   m = max S;   E = e^(S - m);   l = sum E;
//   W = dropout(E / l) and O = O + V^T W for every block

// Scores of a task's panels: half of a second-level cache of 2 MB, which leaves the other half to keys and values.
constexpr int64_t kScoreBytes = 1 << 20;

template <class T, class Word>
struct WeightsTask : ForwardTask<T, Word> {
  using Base = ForwardTask<T, Word>;
  using Base::kMinusInfinity, Base::kRowStep, Base::kStrideAtMost;
  using Base::W, Base::p, Base::panels, Base::count, Base::keys, Base::tile, Base::block_max, Base::alpha;
  using typename Base::Acc, typename Base::Rules, typename Base::Panel;
  template <int NV>
  static constexpr int64_t kStride = Base::template kStride<NV>;
  // Keys written together: a cache line of weights, or a register of them if that is more.
  static constexpr int kLine = kCacheLine / sizeof(T) > W ? kCacheLine / sizeof(T) : W;

  // Whether a line of weights is one word for each of W pairs of keys.
  static constexpr bool kLinesAreWords = Rules::kDepth * sizeof(T) == sizeof(Acc) && Rules::kDepth > 1;

  Acc* const sums;  // [panel][key][lane] of weights, to which those of this task are added; null: they are written
  bool streaming;
  TileKind* kinds;  // [block][panel], from the first pass over the keys for the others

  static int64_t score_rows(const FusedForward& p) { return round_up(p.keys, kKeyStep) + kRowStep; }
  static int64_t panels_at_most(const FusedForward& p) {
    const int64_t bytes = score_rows(p) * kStrideAtMost * static_cast<int64_t>(sizeof(Acc));
    return max_of(1, min_of(kTaskPanels, kScoreBytes / bytes));
  }

  WeightsTask(const FusedForward& problem, const ForwardSplit& s, const ForwardShare& share, bool only_finite)
      : Base(problem, s, share, only_finite,
             share.count * (score_rows(problem) * kStrideAtMost + ceil_div(problem.keys, kKeyBlock) + 1)),
        sums(static_cast<Acc*>(share.weight_sums)),
        streaming(!sums && bypasses_caches<T>(p.batch, p.queries, p.keys, p.weights)),
        kinds(reinterpret_cast<TileKind*>(scores_of(count))) {
    static_assert(sizeof(TileKind) <= sizeof(Acc), "kinds must fit into what was asked for above");
    for (int64_t i = 0; i < kPanelVectors<Acc> * W; ++i) alpha[i] = 1;
  }

  // Scores of the panel's keys from keys.begin on.
  Acc* scores_of(int i) const { return this->extra + i * score_rows(p) * kStrideAtMost; }
  TileKind& kind_of(int i, int64_t key) const { return kinds[(key - keys.begin) / kKeyBlock * count + i]; }
  int64_t block_size(int64_t key) const { return min_of(kKeyBlock, keys.end - key); }

  void run() {
    for (int64_t key = keys.begin; key < keys.end; key += kKeyBlock) score_block(key, block_size(key));
    for (int i = 0; i < count; ++i)
      with_vectors<Acc>(panels[i].at.vectors, [&](auto v) { exponentials<decltype(v)::count>(i); });
    for (int64_t key = keys.begin; key < keys.end; key += kKeyBlock) weigh_block(key, block_size(key));
    for (int i = 0; i < count; ++i) {
      Panel& panel = panels[i];
      hide(panel, 0, min_of(keys.begin, p.keys));
      hide(panel, max_of(min_of(keys.begin, p.keys), keys.end), p.keys);
      this->finish_panel(panel, true);
    }
    if (streaming) stream_fence();
  }

  void score_block(int64_t key, int64_t n) {
    const bool any = this->any_visible(key, n);
    for (int i = 0; i < count; ++i) kind_of(i, key) = panels[i].kind;
    if (!any) return;
    const RowFactor rows = this->key_rows(key, n);
    for (int i = 0; i < count; ++i) {
      Panel& panel = panels[i];
      if (panel.kind == TileKind::hidden) continue;
      const PanelPart part = this->part_of(panel, key, n);
      with_vectors<Acc>(panel.at.vectors, [&](auto v) {
        constexpr int NV = decltype(v)::count;
        this->template score<NV>(panel, part, rows, scores_of(i) + (part.key - keys.begin) * kStride<NV>);
        for (int u = 0; u < NV; ++u)
          store<Acc>(panel.max + u * W, vec_max(load<Acc>(block_max + u * W), load<Acc>(panel.max + u * W)));
      });
    }
  }

  // scores := e^(scores - max) in every block that the panel sees; sum: their sum, and the sink's term.
  template <int NV>
  void exponentials(int i) {
    Panel& panel = panels[i];
    const Exponential<Acc> exponential = panel.exponential;
    Vec<Acc> shift[NV], sum[NV];
    for (int v = 0; v < NV; ++v) {
      const Vec<Acc> max = load<Acc>(panel.max + v * W);
      shift[v] = finite_shift<Acc>(max);
      sum[v] = exponential.template operator()<Acc>(panel.sink - shift[v]);
    }
    for (int64_t key = keys.begin; key < keys.end; key += kKeyBlock) {
      if (kind_of(i, key) == TileKind::hidden) continue;
      const PanelPart part = this->part_of(panel, key, block_size(key));
      Acc* e = scores_of(i) + (part.key - keys.begin) * kStride<NV>;
      for (int64_t j = 0; j < part.n; ++j, e += kStride<NV>)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) {
          const Vec<Acc> term = exponential.template operator()<T>(load<Acc>(e + v * W) - shift[v]);
          store<Acc>(e + v * W, term);
          sum[v] += term;
        }
    }
    for (int v = 0; v < NV; ++v) store<Acc>(panel.sum + v * W, sum[v]);
  }

  void weigh_block(int64_t key, int64_t n) {
    bool any = false;
    for (int i = 0; i < count; ++i) any |= kind_of(i, key) != TileKind::hidden;
    const RowFactor columns = any ? this->value_columns(key, n) : RowFactor{};
    for (int i = 0; i < count; ++i) {
      Panel& panel = panels[i];
      if (kind_of(i, key) == TileKind::hidden) {
        hide(panel, key, key + n);
        continue;
      }
      const PanelPart part = this->part_of(panel, key, n);
      hide(panel, key, part.key);
      hide(panel, part.key + part.n, key + n);
      with_vectors<Acc>(panel.at.vectors, [&](auto v) {
        constexpr int NV = decltype(v)::count;
        weigh<NV>(panel, part, scores_of(i) + (part.key - keys.begin) * kStride<NV>);
        this->template add_values<NV>(panel, part, columns);
      });
    }
  }

  // Writes the weights of the part to memory, and to the tile as words.
  template <int NV>
  void weigh(const Panel& panel, const PanelPart& part, const Acc* e) {
    const MatrixWriter<T> weights(p.batch, panel.at.entry, p.weights);
    for (int v = 0; v < NV; ++v) {
      const auto weight = Normalizer<Acc>::of(inverse_sum<Acc>(load<Acc>(panel.sum + v * W), panel.dropout.keep_scale));
      const int lanes = static_cast<int>(min_of(W, panel.at.lanes - v * W));
      for (int64_t j = 0; j < part.n; j += kLine) {
        const int64_t n = min_of(kLine, part.n - j);
        Vec<Acc> line[kLine];
        normalise(panel, e + j * kStride<NV> + v * W, kStride<NV>, v, part.key + j, n, weight, line);
        Word* const words = reinterpret_cast<Word*>(tile) + j / Rules::kDepth * kStride<NV> + v * W;
        for (int r = 0; r < kLine; r += Rules::kDepth) {
          Vec<Acc> terms[Rules::kDepth];
          for (int i = 0; i < Rules::kDepth; ++i) terms[i] = line[r + i];
          Rules::store_words(words + r / Rules::kDepth * kStride<NV>, terms);
        }
        if (sums) add_line(panel, v, part.key + j, n, line);
        else if (n == kLine && weights.col_stride == 1 && kLinesAreWords)
          write_words<NV>(weights, panel.at.query + v * W, lanes, part.key + j, words);
        else write_line(weights, panel.at.query + v * W, lanes, part.key + j, n, line);
      }
    }
  }

  // With only_finite this is a panel's second run: the values have changed, and the weights have been added before.
  void add_line(const Panel& panel, int v, int64_t key, int64_t n, const Vec<Acc> (&line)[kLine]) const {
    if (this->only_finite) return;
    Acc* sum = sums + ((&panel - panels) * p.keys + key) * Base::kLanesAtMost + v * W;
    for (int r = 0; r < n; ++r, sum += Base::kLanesAtMost) store<Acc>(sum, load<Acc>(sum) + line[r]);
  }

  // line[r]: weights of key + r, zero from n on.
  static void normalise(const Panel& panel, const Acc* e, int64_t stride, int v, int64_t key, int64_t n,
                        const Normalizer<Acc>& weight, Vec<Acc> (&line)[kLine]) {
    for (int r = 0; r < kLine; ++r) line[r] = r < n ? weight(load<Acc>(e + r * stride)) : Vec<Acc>{};
    if (!panel.dropout.active) return;
    for (int r = 0; r < n; r += kKeysPerBlock) {
      const DroppedKeys<Acc> dropped = panel.dropout.keys(v, (key + r) / kKeysPerBlock);
#pragma GCC unroll 8
      for (int i = 0; i < kKeysPerBlock; ++i) line[r + i] = dropped.apply(line[r + i], i);
    }
  }

  // Pairs of weights as they were stored for the product, transposed, are a line of each query as it lies in memory:
  // half the shuffles, and narrowed once.
  template <int NV>
  void write_words(const MatrixWriter<T>& weights, int64_t query, int lanes, int64_t key, const Word* words) const {
    Vec<Acc> rows[W];
    for (int r = 0; r < W; ++r) rows[r] = load<Acc>(reinterpret_cast<const Acc*>(words + r * kStride<NV>));
    transpose(rows);
    for (int i = 0; i < lanes; ++i) {
      T* const out = weights.row(query + i).from(key).p;
      if (streaming) stream(reinterpret_cast<Acc*>(out), rows[i]);
      else std::memcpy(out, &rows[i], sizeof rows[i]);  // out is aligned to T only
    }
  }

  void write_line(const MatrixWriter<T>& weights, int64_t query, int lanes, int64_t key, int64_t n,
                  const Vec<Acc> (&line)[kLine]) const {
    Vec<Acc> rows[kLine / W][W];
    for (int b = 0; b < kLine / W; ++b) {
      for (int r = 0; r < W; ++r) rows[b][r] = line[b * W + r];
      transpose(rows[b]);
    }
    for (int i = 0; i < lanes; ++i) {
      const RowWriter<T> row = weights.row(query + i).from(key);
      if (streaming && n == kLine) {
        for (int b = 0; b < kLine / W; ++b) store_streaming<T>(row.p + b * W, rows[b][i]);
      } else {
        for (int b = 0; b * W < n; ++b) row.write(b * W, static_cast<int>(min_of(W, n - b * W)), rows[b][i]);
      }
    }
  }

  // Keys [begin, end) have no weight.
  void hide(const Panel& panel, int64_t begin, int64_t end) const {
    if (begin >= end || sums) return;
    const MatrixWriter<T> weights(p.batch, panel.at.entry, p.weights);
    for (int64_t i = 0; i < panel.at.lanes; ++i) weights.row(panel.at.query + i).fill(begin, end, 0);
  }
};
