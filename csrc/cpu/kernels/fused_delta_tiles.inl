// The first phase of the fused backward where a gradient arrives through weights that were not kept, because all heads
// went into one mean:
//   delta = sum_j P_j dP_j     from the tiles of fused_gradients.inl, with two products more

template <class T, class Word>
struct TileDeltaTask {
  using Acc = accumulate_t<T>;
  using Rules = WordRules<Word>;
  using Panel = GradPanel<T, Word>;
  static constexpr int W = kLanes<Acc>;

  const FusedBackward& p;
  Panel panel;
  GradTiles<T, Word> tiles;
  Word *packed_keys, *packed_values;
  Acc sums[Panel::kLanesAtMost];

  explicit TileDeltaTask(const FusedBackward& problem) : p(problem) {
    Room().lay_out([&](Room& room) {
      panel.take(room, p);
      tiles.take(room, p);
      packed_keys = room.take<Word>(packed_words<Word>(kGradKeys, p.head_dim));
      packed_values = room.take<Word>(packed_words<Word>(kGradKeys, p.value_dim));
    });
  }

  void run(int64_t entry, int64_t index) {
    const FusedDeltaRows<T> rows(p, entry);
    panel.place(p, entry, index);
    for (int i = 0; i < panel.at.lanes; ++i) rows.write(panel.at.query + i, 0);  // with it dx of a tile is P dP
    std::memset(sums, 0, sizeof sums);
    const KeyRange seen = panel.keys();
    if (seen.begin < seen.end) panel.load_queries(p);
    for (int64_t key = seen.begin / kGradKeys * kGradKeys; key < seen.end; key += kGradKeys)
      add_block(key, min_of(kGradKeys, seen.end - key));
    for (int i = 0; i < panel.at.lanes; ++i) rows.write(panel.at.query + i, sums[i]);
  }

  void add_block(int64_t key, int64_t n) {
    const int64_t entry = panel.at.entry;
    panel.kind = panel.logits.kind(panel.at, panel.reach, key, n);
    if (panel.kind == TileKind::hidden) return;
    RowFactor keys = head_rows<T, Word>(rows_of<T>(p, entry, p.key, key, n, p.head_dim), packed_keys, 1);
    RowFactor values = head_rows<T, Word>(rows_of<T>(p, entry, p.value, key, n, p.value_dim), packed_values, 1);
    with_vectors<Acc>(panel.at.vectors, [&](auto v) {
      constexpr int NV = decltype(v)::count;
      for (int64_t j = 0; j < n; j += kTileKeys) {
        const int64_t n_tile = min_of(kTileKeys, n - j);
        tiles.template compute<NV>(p, panel, key + j, n_tile, keys, values, false);
        if (panel.dropout.active) add_tile<NV, true>(key + j, n_tile);
        else add_tile<NV, false>(key + j, n_tile);
        keys.base += kTileKeys * keys.row_bytes;
        values.base += kTileKeys * values.row_bytes;
      }
    });
  }

  template <int NV, bool kDropout>
  void add_tile(int64_t key, int64_t n) {
    Vec<Acc> sum[NV] = {};  // of the tile alone: shorter sums round less
    tiles.template each_row<NV, kDropout>(panel, false, key, n, [&](int64_t, const auto&, const auto& product) {
#pragma GCC unroll 2
      for (int i = 0; i < Rules::kDepth; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) sum[v] += product[i][v];
    });
    for (int v = 0; v < NV; ++v) store<Acc>(sums + v * W, load<Acc>(sums + v * W) + sum[v]);
  }
};

template <class T, class Word>
struct TileDeltaOf {
  static int64_t panels(const FusedBackward& p) { return PanelSpread::of<accumulate_t<T>>(p.queries).panels; }
  static int64_t tasks(const FusedBackward& p) { return p.batch.count() * panels(p); }

  static void run(const FusedBackward& p, int64_t begin, int64_t end) {
    const WordSession<Word> session;
    TileDeltaTask<T, Word> task(p);
    for (int64_t i = begin; i < end; ++i) task.run(i / panels(p), i % panels(p));
  }
};

template <class T>
struct TileDeltaKernel : TileDeltaOf<T, typename FusedWord<T>::type> {};
