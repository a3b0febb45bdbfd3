// Fused backward: dQ, dK and dV. For a group of panels of queries, block by block of keys, with P and dS from the tiles
// of fused_gradients.inl:
//   dQ^T += K^T dS^T       panel by panel
//   dV   += P dO           the queries of the whole group as depth
//   dK   += dS Q
//   dbias += dS            where backward_plan.h says so
// dQ is complete when the group has met all keys; dK and dV when all groups of all query heads that share them have.

template <class T, class Word>
struct BackwardTask {
  using Acc = accumulate_t<T>;
  using Rules = WordRules<Word>;
  using Element = typename Rules::Element;
  using Panel = GradPanel<T, Word>;
  using Tiles = GradTiles<T, Word>;
  using Sums = BackwardSums<T, Word>;
  static constexpr int W = kLanes<Acc>;
  static constexpr int kPanels = kGroupPanels<Acc>;
  static constexpr int64_t kRowsPadded = Tiles::kRowsPadded;
  static constexpr KeyRange kNoRows = {0, 0};
  // A line more than the lanes, so that rows do not crowd one set of the cache. Depths that fill no tile run into it.
  static constexpr int64_t kRowStride = Sums::kGroupLanes + kCacheLine / static_cast<int64_t>(sizeof(Element));

  struct GroupPanel : Panel {
    int64_t lane;    // where it begins in the group
    Acc* sums;       // its dQ^T
    Acc* bias_sums;  // null: none
  };

  const FusedBackward& p;
  const BackwardSplit<Acc>& split;
  const BackwardPart part;
  Sums sums;
  const BiasSums<T>& bias_sums;
  Tiles tiles;
  GroupPanel panels[kPanels];
  int count = 0;                          // of the group at hand
  Factor<T> query_columns, grad_columns;  // Q and dO of the group
  LaneRows<Word> queries, grad_outputs;   // the same, for the products
  KeyRows<Element> weights, grads;        // P after dropout and dS of the block at hand
  Word* grads_by_depth;                   // dS of a panel, [key][lane]; where words are elements, `grads` is that
  RowFactor keys, key_columns, values;
  bool packed = false;
  bool query_spoilt = false, keys_spoilt = false;  // results are not all finite
  Word *packed_keys, *packed_columns, *packed_values, *packed_queries, *packed_grads;
  T *finite_keys, *finite_queries, *finite_grads;

  BackwardTask(const FusedBackward& problem, const BackwardSplit<Acc>& s, const BackwardPart& which,
               const BiasSums<T>& bias)
      : p(problem), split(s), part(which), sums(p, s, which), bias_sums(bias) {
    const int64_t n = sums.keys(), lanes = Sums::kGroupLanes, block_rows = kGradKeys + kRowsPadded;
    const int64_t finite = part.only_finite ? 1 : 0;
    Room().lay_out([&](Room& room) {
      tiles.take(room, p);
      sums.take(room);
      for (Panel& panel : panels) panel.take(room, p);
      weights = {room.take<Element>(block_rows * kRowStride), kRowStride};
      grads = {room.take<Element>(block_rows * kRowStride), kRowStride};
      grads_by_depth = room.take<Word>(Rules::kDepth == 1 ? 0 : block_rows / Rules::kDepth * Panel::kStride);
      packed_keys = room.take<Word>(packed_words<Word>(n, p.head_dim));
      packed_columns = room.take<Word>(packed_words<Word>(p.head_dim, n));
      packed_values = room.take<Word>(packed_words<Word>(n, p.value_dim));
      packed_queries = room.take<Word>(Sums::kLaneWords * Sums::row_stride(p.head_dim));
      packed_grads = room.take<Word>(Sums::kLaneWords * Sums::row_stride(p.value_dim));
      finite_keys = room.take<T>(finite * n * p.head_dim);
      finite_queries = room.take<T>(finite * lanes * p.head_dim);
      finite_grads = room.take<T>(finite * lanes * p.value_dim);
    });
  }

  void run() {
    if (part.first) sums.clear_keys();
    for (int64_t i = 0; i < part.groups; ++i) add_group(part.first_group + i);
    if (!part.last) return;
    if (part.want_key) keys_spoilt |= !sums.write_keys(p.grad_key, sums.key, p.head_dim, to_finite<Acc>(p.scale));
    const Acc keep_scale = PanelDropout<T>::scale_of_kept(p);
    if (part.want_value) keys_spoilt |= !sums.write_keys(p.grad_value, sums.value, p.value_dim, keep_scale);
  }

  void add_group(int64_t group) {
    const KeyRange seen = place_group(group);
    if (seen.begin < seen.end) {
      if (!packed) pack_keys();
      load_group();
    }
    for (int64_t key = seen.begin; key < seen.end; key += kGradKeys) add_block(key, min_of(kGradKeys, seen.end - key));
    if (writes_bias()) clear_bias_outside(seen);
    if (!part.last || !part.want_query) return;
    for (int i = 0; i < count; ++i) query_spoilt |= !sums.write_queries(panels[i].sums, panels[i].at);
  }

  // Returns the keys of the part that some panel of the group looks at, from the beginning of a block on.
  KeyRange place_group(int64_t index) {
    const PanelGroup group = split.group(p, part.head, index);
    count = group.count;
    KeyRange seen{INT64_MAX, 0};
    int64_t lane = 0;
    for (int i = 0; i < count; ++i) {
      GroupPanel& panel = panels[i];
      panel.place(p, group.entry, group.first + i);
      panel.lane = lane;
      lane += panel.at.vectors * W;
      panel.sums = sums.query_sums(group.entry, group.first + i, i);
      panel.bias_sums = part.want_bias ? bias_sums.of(index, group.first + i) : nullptr;
      if (part.first && part.want_query) sums.clear_queries(panel.sums);
      const KeyRange range = panel.keys();
      if (range.begin < range.end) seen = {min_of(seen.begin, range.begin), max_of(seen.end, range.end)};
    }
    return {max_of(part.keys.begin, seen.begin / kGradKeys * kGradKeys), min_of(part.keys.end, seen.end)};
  }

  // The keys of the part, once for all groups.
  void pack_keys() {
    const int64_t entry = part.head * p.group, first = part.keys.begin, n = sums.keys();
    keys = head_rows<T, Word>(rows_of<T>(p, entry, p.key, first, n, p.head_dim), packed_keys, split.groups);
    values = head_rows<T, Word>(rows_of<T>(p, entry, p.value, first, n, p.value_dim), packed_values, split.groups);
    keys.streams = values.streams = false;  // every group reads them
    packed = true;
    if (!part.want_query) return;
    Factor<T> columns = columns_of<T>(p, entry, p.key, first, n, p.head_dim);
    if (part.only_finite) columns = keep_finite(columns, finite_keys);
    key_columns = head_columns<T, Word>(columns, packed_columns, split.groups);
  }

  void load_group() {
    for (int i = 0; i < count; ++i) panels[i].load_queries(p);
    const QueryPanel &first = panels[0].at, &last = panels[count - 1].at;
    const int64_t lanes = last.query + last.lanes - first.query;
    query_columns = columns_of<T>(p, first.entry, p.query, first.query, lanes, p.head_dim);
    grad_columns = columns_of<T>(p, first.entry, p.grad_output, first.query, lanes, p.value_dim);
    if (part.want_key)
      queries = Sums::lane_rows(part.only_finite ? keep_finite(query_columns, finite_queries) : query_columns,
                                packed_queries);
    if (part.want_value)
      grad_outputs =
          Sums::lane_rows(part.only_finite ? keep_finite(grad_columns, finite_grads) : grad_columns, packed_grads);
  }

  void add_block(int64_t key, int64_t n) {
    KeyRange active{INT64_MAX, 0}, rows{INT64_MAX, 0};  // panels that look at the block, rows of it that they look at
    for (int i = 0; i < count; ++i) {
      GroupPanel& panel = panels[i];
      panel.kind = panel.logits.kind(panel.at, panel.reach, key, n);
      if (panel.kind == TileKind::hidden) continue;
      const KeyRange looked_at = rows_of_block(panel, key, n);
      active = {min_of(active.begin, i), i + 1};
      rows = {min_of(rows.begin, looked_at.begin), max_of(rows.end, looked_at.end)};
    }
    for (int64_t i = active.begin; i < active.end; ++i) {
      GroupPanel& panel = panels[i];
      if (panel.kind == TileKind::hidden) clear_lanes(whole(rows), panel.lane, panel.at.vectors);
      else with_vectors<Acc>(panel.at.vectors, [&](auto v) { add_panel<decltype(v)::count>(panel, key, n, rows); });
    }
    if (active.begin < active.end) add_to_keys(key, rows, active);
    for (int i = 0; i < count && writes_bias(); ++i)
      write_bias(panels[i], key, n, i >= active.begin && i < active.end ? rows : kNoRows);
  }

  // Where no other head shares the bias, its gradient is written block by block.
  bool writes_bias() const { return part.want_bias && !bias_sums; }
  // Rows `rows` of dS, of the `n` of a block; the others are 0.
  void write_bias(const GroupPanel& panel, int64_t key, int64_t n, KeyRange rows) const {
    write_grad_bias<T>(p, panel.at, key, n, KeyRows<Element>{grads.at(0, panel.lane), kRowStride}, rows);
  }
  void clear_bias_outside(KeyRange seen) const {
    const int64_t first = min_of(seen.begin, part.keys.end), end = max_of(first, seen.end);
    for (int i = 0; i < count; ++i) {
      write_bias(panels[i], part.keys.begin, first - part.keys.begin, kNoRows);
      write_bias(panels[i], end, part.keys.end - end, kNoRows);
    }
  }

  // The rows of the block that hold keys the panel looks at, from a step on.
  static KeyRange rows_of_block(const GroupPanel& panel, int64_t key, int64_t n) {
    const KeyRange range = panel.keys();
    return {max_of(0, range.begin - key) / kKeyStep * kKeyStep, min_of(n, range.end - key)};
  }

  // With the rows that a last tile reads.
  static KeyRange whole(KeyRange rows) { return {rows.begin, round_up(rows.end, kRowsPadded)}; }

  void clear_lanes(KeyRange rows, int64_t lane, int vectors) const {
    for (int64_t j = rows.begin; j < rows.end; ++j)
      for (int v = 0; v < vectors; ++v) {
        store<Element>(weights.at(j, lane + v * W), Vec<Acc>{});
        store<Element>(grads.at(j, lane + v * W), Vec<Acc>{});
      }
  }

  // P and dS of one panel, as far as it looks at the block; zeros in the other rows. dQ^T += K^T dS^T.
  template <int NV>
  void add_panel(GroupPanel& panel, int64_t block, int64_t n, KeyRange rows) {
    constexpr int64_t kStride = NV * W + Rules::kPanelPadding;
    const KeyRange own = rows_of_block(panel, block, n);
    const int64_t first = own.begin, size = own.end - own.begin, padded = round_up(size, kRowsPadded);
    const int64_t key = block + first, skipped = key - part.keys.begin;
    RowFactor key_rows = keys, value_rows = values, columns = key_columns;
    key_rows.base += skipped * keys.row_bytes;
    value_rows.base += skipped * values.row_bytes;
    columns.base += skipped / Rules::kDepth * columns.word_bytes;

    for (int64_t j = 0; j < size; j += kTileKeys) {
      const int64_t n_tile = min_of(kTileKeys, size - j);
      tiles.template compute<NV>(p, panel, key + j, n_tile, key_rows, value_rows, true);
      keep_tile<NV>(panel, key + j, first + j, n_tile, grads_by_depth + j / Rules::kDepth * kStride);
      key_rows.base += kTileKeys * keys.row_bytes;
      value_rows.base += kTileKeys * values.row_bytes;
    }
    clear_lanes({rows.begin, first}, panel.lane, NV);
    clear_lanes({first + padded, whole(rows).end}, panel.lane, NV);

    if (!part.want_query) return;
    if constexpr (Rules::kDepth > 1)
      sums.template add_to_queries<NV>(panel.sums, columns, grads_by_depth, kStride, size);
    else sums.template add_to_queries<NV>(panel.sums, columns, grads.at(first, panel.lane), kRowStride, size);
    if (part.only_finite)
      sums.add_unbounded_to_queries(panel.sums, kStride, columns_of<T>(p, panel.at.entry, p.key, key, size, p.head_dim),
                                    {grads.at(first, 0), kRowStride}, panel.lane, NV);
  }

  // P and dS of a tile, as words; dS also, not rounded to words, to the sums for the bias.
  template <int NV>
  void keep_tile(const GroupPanel& panel, int64_t key, int64_t row, int64_t n, Word* by_depth) const {
    constexpr int64_t kStride = NV * W + Rules::kPanelPadding;
    Acc* const bias = panel.bias_sums ? panel.bias_sums + (key - part.keys.begin) * bias_sums.stride : nullptr;
    tiles.template each_row<NV>(
        p, panel, key, round_up(n, kRowsPadded), [&](int64_t j, const auto& weight, const auto& grad) {
#pragma GCC unroll 2
          for (int i = 0; i < Rules::kDepth; ++i) {
            Rules::template store_row<Element>(weights.at(row + j + i, panel.lane), weight[i], false);
            Rules::template store_row<Element>(grads.at(row + j + i, panel.lane), grad[i], false);
          }
          if constexpr (Rules::kDepth > 1) {
#pragma GCC unroll 4
            for (int v = 0; v < NV; ++v)
              Rules::store_words(by_depth + j / Rules::kDepth * kStride + v * W, {grad[0][v], grad[1][v]});
          }
          if (bias)
            for (int i = 0; i < Rules::kDepth; ++i) bias_sums.template add<NV>(bias, j + i, grad[i]);
        });
  }

  // dV += P dO, dK += dS Q with the lanes of the panels that look at the block.
  void add_to_keys(int64_t block, KeyRange rows, KeyRange active) {
    const GroupPanel& last = panels[active.end - 1];
    const KeyRange lanes = {panels[active.begin].lane, last.lane + last.at.lanes};
    if constexpr (Rules::kDepthMultiple > Rules::kDepth) {
      // The last tile of the depth reads on behind these lanes: into lanes that nothing was written to.
      const int64_t end = last.lane + last.at.vectors * W;
      if ((end - lanes.begin) % Rules::kDepthMultiple) clear_lanes(whole(rows), end, 1);
    }
    const int64_t skipped = block - part.keys.begin;
    if (part.want_value) {
      Acc* to = sums.value + skipped * Sums::row_stride(p.value_dim);
      sums.add_to_keys(to, p.value_dim, weights, rows, lanes, grad_outputs);
      if (part.only_finite) sums.add_unbounded_to_keys(to, weights, rows, lanes, grad_columns);
    }
    if (part.want_key) {
      Acc* to = sums.key + skipped * Sums::row_stride(p.head_dim);
      sums.add_to_keys(to, p.head_dim, grads, rows, lanes, queries);
      if (part.only_finite) sums.add_unbounded_to_keys(to, grads, rows, lanes, query_columns);
    }
  }
};

template <class T, class Word>
struct FusedBackwardOf {
  using Acc = accumulate_t<T>;

  static constexpr int64_t kRowsPadded = BackwardTask<T, Word>::kRowsPadded;

  static int64_t tasks(const FusedBackward& p) { return BackwardSplit<Acc>(p).tasks(); }

  static void run(const FusedBackward& p, int64_t begin, int64_t end) {
    const BackwardSplit<Acc> split(p);
    const WordSession<Word> session;
    for (int64_t task = begin; task < end; ++task) {
      const BiasSums<T> bias(p, split, split.part(p, split.turn(p, task, 0)), kRowsPadded);
      for (int64_t place = 0; place < split.plan.series_length; ++place)
        take_turn(p, split, split.turn(p, task, place), bias);
      if (bias) bias.write();
    }
  }

  static void take_turn(const FusedBackward& p, const BackwardSplit<Acc>& split, const BackwardTurn& turn,
                        const BiasSums<T>& bias) {
    BackwardTask<T, Word> backward(p, split, split.part(p, turn), bias);
    backward.run();
    for (int64_t wave = 0; wave < split.plan.ranges && backward.query_spoilt; ++wave)
      BackwardTask<T, Word>(p, split, split.only_queries(p, turn, wave), bias).run();
    for (int64_t wave = 0; wave < split.plan.ranges && backward.keys_spoilt; ++wave)
      BackwardTask<T, Word>(p, split, split.only_keys(p, turn, wave), bias).run();
  }
};

template <class T>
struct FusedBackwardKernel : FusedBackwardOf<T, typename FusedWord<T>::type> {};
