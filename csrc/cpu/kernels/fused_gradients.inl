// What the kernels of the fused backward share: for the queries of a panel and a block of keys, tile by tile,
//   S = K Q^T                    keys x queries, as in the forward and with the same bits
//   P = e^(x(S) - m) / l         m, l: row_max and row_sum of the forward; nothing is normalized anew
//   dP = V dO^T + dW^T           both through dropout
//   dx = P (dP - delta)          delta: fused_delta.inl
//   dS = dx dx/ds                the slope of softcap; 0 for hidden keys
// Dao, "FlashAttention", 2022, appendix B.4.

// Keys of a block: the depth of the product for dQ, and rows of P and dS that stay in the second-level cache until the
// whole group has been through (128 x 256 floats, 128 KB each). 256 keys measured no better and lose more at the ends.
constexpr int64_t kGradKeys = BackwardPlan::kKeys;
// Keys of a tile: scores and gradients of a panel (64 x 64 floats, 16 KB each) stay in the first-level cache until P
// and dS are worked out. bfloat16 on tile registers 417 -> 430 GF/s against 128 keys; 32 keys measured the same.
constexpr int64_t kTileKeys = 64;
// Panels of a group, whose queries are the depth of the products for dK and dV.
template <class Acc>
constexpr int kGroupPanels = BackwardPlan::kQueries / (kPanelVectors<Acc> * kLanes<Acc>);

template <class T, class Word>
struct GradPanel {
  using Acc = accumulate_t<T>;
  using Rules = WordRules<Word>;
  static constexpr int W = kLanes<Acc>;
  static constexpr int kLanesAtMost = kPanelVectors<Acc> * W;
  static constexpr int kStride = kLanesAtMost + Rules::kPanelPadding;  // of the widest panel

  QueryPanel at;
  PanelReach<Acc> reach;
  Logits<T> logits;
  PanelDropout<T> dropout;
  Exponential<Acc> exponential;
  Word *query, *grad_output;     // packed: [depth][lane]
  Acc *shift, *inverse, *delta;  // [lane]: m, 1 / l, delta
  // [lane]: what takes the place of scores other than -inf. 0: they stay; -inf: in padding and in rows that see
  // nothing; NaN: in rows that saw NaN.
  Acc* override_score;
  bool overrides;  // in some lane
  TileKind kind;   // of the block at hand

  int64_t stride() const { return at.vectors * W + Rules::kPanelPadding; }

  void take(Room& room, const Attention& p) {
    query = room.take<Word>(packed_panel(p.head_dim));
    grad_output = room.take<Word>(packed_panel(p.value_dim));
    shift = room.take<Acc>(kLanesAtMost);
    inverse = room.take<Acc>(kLanesAtMost);
    delta = room.take<Acc>(kLanesAtMost);
    override_score = room.take<Acc>(kLanesAtMost);
  }
  static int64_t packed_panel(int64_t depth) {
    return round_up(ceil_div(depth, Rules::kDepth), max_of(W, Rules::kDepthMultiple)) * kStride;
  }

  void place(const FusedBackward& p, int64_t entry, int64_t index) {
    at = query_panel<Acc>(p, entry, index);
    logits = Logits<T>(p, entry);
    reach = PanelReach<Acc>(logits.visibility, at);
    dropout = PanelDropout<T>(p, at);
    exponential = Exponential<Acc>::of(logits.unit);
  }

  KeyRange keys() const { return logits.keys(reach); }

  void load_queries(const FusedBackward& p) {
    Rules::pack_by_depth(rows_of<T>(p, at.entry, p.query, at.query, at.lanes, p.head_dim), query, stride());
    Rules::pack_by_depth(rows_of<T>(p, at.entry, p.grad_output, at.query, at.lanes, p.value_dim), grad_output,
                         stride());
    const MatrixReader<Acc> maxima(p.batch, at.entry, p.row_max), sums(p.batch, at.entry, p.row_sum);
    const MatrixWriter<Acc> deltas(p.batch, at.entry, p.delta);
    overrides = false;
    for (int i = 0; i < at.vectors * W; ++i) {
      const bool padding = i >= at.lanes;
      const Acc max = padding ? 0 : *maxima.row(at.query + i).p, sum = padding ? 0 : *sums.row(at.query + i).p;
      override_score[i] = sum == 0 ? Logits<T>::kMinusInfinity : sum - sum;
      overrides |= !(override_score[i] == 0);
      shift[i] = override_score[i] == 0 ? max : 0;
      inverse[i] = override_score[i] == 0 ? 1 / sum : 1;
      delta[i] = padding ? 0 : *deltas.row(at.query + i).p;
    }
  }
};

// The tiles of one panel and one block of keys, [key][lane].
template <class T, class Word>
struct GradTiles {
  using Acc = accumulate_t<T>;
  using Rules = WordRules<Word>;
  using Panel = GradPanel<T, Word>;
  static constexpr int W = kLanes<Acc>;
  // Rows come in whole Philox blocks of keys, and in whole tiles of pairs.
  static constexpr int64_t kRowsPadded = Rules::kDepthMultiple > kKeysPerBlock ? Rules::kDepthMultiple : kKeysPerBlock;

  Acc *scores, *grads, *slopes;  // S, dP, dx/ds

  void take(Room& room, const FusedBackward& p) {
    const int64_t size = (kTileKeys + kRowsPadded) * Panel::kStride;
    scores = room.take<Acc>(size);
    grads = room.take<Acc>(size);
    slopes = room.take<Acc>(sloped(p) ? size : 0);
  }

  static bool sloped(const FusedBackward& p) { return p.softcap != 0 || p.mask_value != -__builtin_inf(); }

  // Scores as logits, dP before dropout, and slopes, of keys [key, key + n). In the rows that fill up to a multiple of
  // kRowsPadded all weights will be 0. `capped`: slopes with that of softcap.
  template <int NV>
  void compute(const FusedBackward& p, const Panel& panel, int64_t key, int64_t n, const RowFactor& keys,
               const RowFactor& values, bool capped) {
    constexpr int64_t kStride = NV * W + Rules::kPanelPadding;
    SumSink<Acc> score_sums{{n, NV * W, scores, kStride}}, grad_sums{{n, NV * W, grads, kStride}};
    PanelRows<Word>::template run<NV>(score_sums, keys, panel.query, kStride, 0, ceil_div(p.head_dim, Rules::kDepth));
    const Logits<T>& logits = panel.logits;
    if (sloped(p)) logits.slopes(panel.at, panel.reach, panel.kind, scores, slopes, kStride, key, n, capped);
    if (logits.scaled || panel.kind == TileKind::mixed) {
      Acc max[Panel::kLanesAtMost] = {};  // of no use here
      logits.apply(panel.at, panel.reach, panel.kind, scores, kStride, key, n, max);
    }
    if (panel.overrides) override_scores(panel, n);
    for (int64_t j = n; j < round_up(n, kRowsPadded); ++j)
      for (int v = 0; v < NV; ++v) store<Acc>(scores + j * kStride + v * W, splat(Logits<T>::kMinusInfinity));

    PanelRows<Word>::template run<NV>(grad_sums, values, panel.grad_output, kStride, 0,
                                      ceil_div(p.value_dim, Rules::kDepth));
    if (p.grad_weights) add_grad_weights(p, panel, key, n);
  }

  void override_scores(const Panel& panel, int64_t n) {
    constexpr Acc kMinusInfinity = Logits<T>::kMinusInfinity;
    for (int v = 0; v < panel.at.vectors; ++v) {
      const Vec<Acc> instead = load<Acc>(panel.override_score + v * W);
      Acc* tile = scores + v * W;
      for (int64_t j = 0; j < n; ++j, tile += panel.stride()) {
        const Vec<Acc> s = load<Acc>(tile);
        store<Acc>(tile, select<Acc>((instead == 0) | (s == kMinusInfinity), s, instead));
      }
    }
  }

  void add_grad_weights(const FusedBackward& p, const Panel& panel, int64_t key, int64_t n) {
    const int64_t stride = panel.stride();
    const MatrixReader<T> rows(p.batch, panel.at.entry, p.grad_weights);
    for (int v = 0; v < panel.at.vectors; ++v)
      for (int64_t j = 0; j < n; j += W) {
        const int count = static_cast<int>(min_of(W, n - j));
        Vec<Acc> added[W];
        read_transposed<Acc>([&](int64_t query, int size) { return rows.row(query).from(key + j).read(0, size); },
                             panel.at, v, count, added);
        Acc* tile = grads + j * stride + v * W;
        for (int i = 0; i < count; ++i, tile += stride) store<Acc>(tile, load<Acc>(tile) + added[i]);
      }
  }

  struct Terms {
    Vec<Acc> weight, gradient;  // P after dropout, not yet divided by 1 - p; dS
  };

  // Vector v of row `row`, which is key n of its Philox block. Where P is 0 everything is, whatever the other factors
  // hold.
  template <int NV, bool kDropout>
  MHA_INLINE_MEMBER Terms terms(const Panel& panel, bool sloped, int64_t row, int v, const DroppedKeys<Acc>& dropped,
                                int n) const {
    const int64_t at = row * (NV * W + Rules::kPanelPadding) + v * W;
    const Vec<Acc> zero = {}, below_max = load<Acc>(scores + at) - load<Acc>(panel.shift + v * W);
    const Vec<Acc> weight = panel.exponential.template operator()<T>(below_max) * load<Acc>(panel.inverse + v * W);
    Vec<Acc> kept = weight, grad = load<Acc>(grads + at);
    if constexpr (kDropout) {
      kept = dropped.apply(weight, n);
      grad = dropped.apply(grad, n);
    }
    grad = mul_add(grad, splat(panel.dropout.keep_scale), -load<Acc>(panel.delta + v * W));
    Vec<Acc> gradient = select<Acc>(weight == 0, zero, weight * grad);
    if (sloped) {
      const Vec<Acc> slope = load<Acc>(slopes + at);
      gradient = select<Acc>((weight == 0) | (slope == 0), zero, gradient * slope);
    }
    return {kept, gradient};
  }

  // visit(row, Vec weights[kDepth][NV], Vec gradients[kDepth][NV]) for the rows of a word, of `rows` in all.
  template <int NV, class Visit>
  void each_row(const FusedBackward& p, const Panel& panel, int64_t key, int64_t rows, const Visit& visit) const {
    if (panel.dropout.active) each_row<NV, true>(panel, sloped(p), key, rows, visit);
    else each_row<NV, false>(panel, sloped(p), key, rows, visit);
  }

  template <int NV, bool kDropout, class Visit>
  void each_row(const Panel& panel, bool sloped, int64_t key, int64_t rows, const Visit& visit) const {
    constexpr int kDepth = Rules::kDepth;
    for (int64_t j = 0; j < rows; j += kKeysPerBlock) {
      DroppedKeys<Acc> dropped[NV];
      if constexpr (kDropout)
        for (int v = 0; v < NV; ++v) dropped[v] = panel.dropout.keys(v, (key + j) / kKeysPerBlock);
      for (int row = 0; row < kKeysPerBlock; row += kDepth) {
        Vec<Acc> weights[kDepth][NV], gradients[kDepth][NV];
#pragma GCC unroll 2
        for (int i = 0; i < kDepth; ++i)
#pragma GCC unroll 4
          for (int v = 0; v < NV; ++v) {
            const Terms t = terms<NV, kDropout>(panel, sloped, j + row + i, v, dropped[v], row + i);
            weights[i][v] = t.weight;
            gradients[i][v] = t.gradient;
          }
        visit(j + row, weights, gradients);
      }
    }
  }
};
