// Fused forward: for the queries of a panel, block by block of keys,
//   S = K Q^T                      tile of scores, keys x queries
//   m' = max(m, max S)             running row maximum
//   P = e^(S - m')
//   l = l e^(m - m') + sum P       running row sum
//   O = O e^(m - m') + V^T P       running output, transposed
// and at the end O / l. Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao,
// "FlashAttention", 2022.

template <class T, class Word>
struct OnlineTask : ForwardTask<T, Word> {
  using Base = ForwardTask<T, Word>;
  using Base::kMinusInfinity, Base::kRowStep;
  using Base::W, Base::p, Base::panels, Base::count, Base::keys, Base::tile, Base::block_max, Base::alpha;
  using typename Base::Acc, typename Base::Rules, typename Base::Panel;
  template <int NV>
  static constexpr int64_t kStride = Base::template kStride<NV>;

  static int64_t panels_at_most(const FusedForward&) { return kTaskPanels; }

  OnlineTask(const FusedForward& problem, const ForwardSplit& s, const ForwardShare& share, bool only_finite)
      : Base(problem, s, share, only_finite, 0) {}

  void run() {
    for (int64_t key = keys.begin; key < keys.end; key += kKeyBlock) {
      const int64_t n = min_of(kKeyBlock, keys.end - key);
      if (this->any_visible(key, n)) add_block(key, n);
    }
    for (int i = 0; i < count; ++i) this->finish_panel(panels[i], false);
  }

  void add_block(int64_t key, int64_t n) {
    const RowFactor rows = this->key_rows(key, n), columns = this->value_columns(key, n);
    for (int i = 0; i < count; ++i) {
      Panel& panel = panels[i];
      if (panel.kind == TileKind::hidden) continue;
      const PanelPart part = this->part_of(panel, key, n);
      with_vectors<Acc>(panel.at.vectors, [&](auto v) {
        constexpr int NV = decltype(v)::count;
        this->template score<NV>(panel, part, rows, tile);
        softmax<NV>(panel, part);
        this->template add_values<NV>(panel, part, columns);
      });
    }
  }

  // Scores to weights, relative to the maximum so far; what was summed before is rescaled to it.
  template <int NV>
  void softmax(Panel& panel, const PanelPart& part) {
    Vec<Acc> shift[NV], sum[NV];
    for (int v = 0; v < NV; ++v) {
      const Vec<Acc> before = load<Acc>(panel.max + v * W), max = vec_max(load<Acc>(block_max + v * W), before);
      store<Acc>(panel.max + v * W, max);
      shift[v] = finite_shift<Acc>(max);
      const Vec<Acc> factor = panel.exponential.template operator()<Acc>(before - shift[v]);
      store<Acc>(alpha + v * W, factor);
      sum[v] = load<Acc>(panel.sum + v * W) * factor;
    }
    const int64_t padded = round_up(part.n, kRowStep);
    for (int64_t j = part.n; j < padded; ++j)
      for (int v = 0; v < NV; ++v) store<Acc>(tile + j * kStride<NV> + v * W, splat(kMinusInfinity));
    if (panel.dropout.active) exponentials<NV, true>(panel, part.key, padded, shift, sum);
    else exponentials<NV, false>(panel, part.key, padded, shift, sum);
    for (int v = 0; v < NV; ++v) store<Acc>(panel.sum + v * W, sum[v]);
  }

  // tile := words of e^(tile - shift), after dropout; sum: before it.
  template <int NV, bool kDropout>
  void exponentials(const Panel& panel, int64_t key, int64_t n, const Vec<Acc> (&shift)[NV], Vec<Acc> (&sum)[NV]) {
    constexpr int kDepth = Rules::kDepth;
    const Exponential<Acc> exponential = panel.exponential;
    for (int64_t j = 0; j < n; j += kKeysPerBlock) {
      DroppedKeys<Acc> dropped[NV];
      if constexpr (kDropout)
        for (int v = 0; v < NV; ++v) dropped[v] = panel.dropout.keys(v, (key + j) / kKeysPerBlock);
#pragma GCC unroll 2
      for (int row = 0; row < kKeysPerBlock; row += kDepth) {
        Acc* from = tile + (j + row) * kStride<NV>;
        Word* to = reinterpret_cast<Word*>(tile) + (j + row) / kDepth * kStride<NV>;
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) {
          Vec<Acc> terms[kDepth];
#pragma GCC unroll 2
          for (int i = 0; i < kDepth; ++i) {
            terms[i] = exponential.template operator()<T>(load<Acc>(from + i * kStride<NV> + v * W) - shift[v]);
            sum[v] += terms[i];
            if constexpr (kDropout) terms[i] = dropped[v].apply(terms[i], row + i);
          }
          Rules::store_words(to + v * W, terms);
        }
      }
    }
  }
};
