// Gradient of the bias where it is not found on the way to the others (core/backward_plan.h): dx of
// fused_gradients.inl, summed over everything that shares an element of the bias. A task
// has the elements of some queries and some keys of one matrix of the bias, or all queries (all keys) where the bias
// has one row (column) for them; it goes through the entries that share the matrix in order and works out their P and
// dP once more. So the memory is that of a tile, whatever is broadcast, and the order of additions is fixed.

constexpr int64_t kBiasKeys = 2 * kGradKeys;  // of a task: two blocks, for which queries are packed once

template <class Acc>
struct BiasSplit {
  BiasSharing heads;
  bool one_row, one_column;
  int64_t vectors, head_panels;
  int64_t groups, key_ranges;  // groups and ranges that tasks are cut by

  explicit BiasSplit(const FusedBackward& p)
      : heads(BiasSharing::of(p, p.batch.ndim)), one_row(bias_has_one_row(p)), one_column(bias_has_one_column(p)) {
    const PanelSpread spread = PanelSpread::of<Acc>(p.queries);
    vectors = spread.vectors;
    head_panels = spread.panels;
    groups = one_row ? 1 : ceil_div(head_panels, kGroupPanels<Acc>);
    key_ranges = one_column ? 1 : ceil_div(p.keys, kBiasKeys);
  }

  int64_t first_query(int64_t panel) const {
    return PanelSpread{vectors, head_panels}.first_vector(panel) * kLanes<Acc>;
  }
  int64_t tasks() const { return heads.matrices.count() * groups * key_ranges; }
};

template <class T, class Word>
struct BiasTask {
  using Acc = accumulate_t<T>;
  using Panel = GradPanel<T, Word>;
  using Tiles = GradTiles<T, Word>;
  using Rules = WordRules<Word>;
  static constexpr int W = kLanes<Acc>;
  static constexpr int64_t kGroupLanes = BackwardPlan::kQueries;

  const FusedBackward& p;
  const BiasSplit<Acc>& split;
  const int64_t matrix;  // of the bias
  int64_t first_panel, end_panel;
  KeyRange keys;
  int64_t key_stride, lane_stride, size;  // of the sums, [key][lane]: 0 where all keys (queries) have one
  Acc *sums, *entry_sums;                 // of all entries so far, of the one at hand: shorter sums round less
  Panel panel;
  Tiles tiles;
  Word *packed_keys, *packed_values;

  BiasTask(const FusedBackward& problem, const BiasSplit<Acc>& s, int64_t task)
      : p(problem), split(s), matrix(task / (s.groups * s.key_ranges)) {
    const int64_t group = task / s.key_ranges % s.groups, range = task % s.key_ranges;
    first_panel = s.head_panels * group / s.groups;
    end_panel = s.head_panels * (group + 1) / s.groups;
    keys = s.one_column ? KeyRange{0, p.keys} : KeyRange{range * kBiasKeys, min_of((range + 1) * kBiasKeys, p.keys)};
    lane_stride = s.one_row ? 0 : 1;
    key_stride = s.one_column ? 0 : s.one_row ? W : kGroupLanes;
    size = (s.one_column ? 1 : kBiasKeys) * (s.one_row ? W : kGroupLanes);
    Room().lay_out([&](Room& room) {
      panel.take(room, p);
      tiles.take(room, p);
      sums = room.take<Acc>(size);
      entry_sums = room.take<Acc>(size);
      packed_keys = room.take<Word>(packed_words<Word>(kGradKeys, p.head_dim));
      packed_values = room.take<Word>(packed_words<Word>(kGradKeys, p.value_dim));
    });
  }

  void run() {
    std::memset(sums, 0, sizeof(Acc) * static_cast<size_t>(size));
    for (int64_t shared = 0; shared < split.heads.sharing.count(); ++shared)
      add_entry(split.heads.entry(matrix, shared));
    write();
  }

  void add_entry(int64_t entry) {
    std::memset(entry_sums, 0, sizeof(Acc) * static_cast<size_t>(size));
    for (int64_t i = first_panel; i < end_panel; ++i) {
      panel.place(p, entry, i);
      const KeyRange seen = {max_of(keys.begin, panel.keys().begin / kGradKeys * kGradKeys),
                             min_of(keys.end, panel.keys().end)};
      if (seen.begin < seen.end) panel.load_queries(p);
      for (int64_t key = seen.begin; key < seen.end; key += kGradKeys)
        add_block(entry, key, min_of(kGradKeys, seen.end - key));
    }
    for (int64_t i = 0; i < size; ++i) sums[i] += entry_sums[i];
  }

  void add_block(int64_t entry, int64_t key, int64_t n) {
    panel.kind = panel.logits.kind(panel.at, panel.reach, key, n);
    if (panel.kind == TileKind::hidden) return;
    RowFactor key_rows = head_rows<T, Word>(rows_of<T>(p, entry, p.key, key, n, p.head_dim), packed_keys, 1);
    RowFactor value_rows = head_rows<T, Word>(rows_of<T>(p, entry, p.value, key, n, p.value_dim), packed_values, 1);
    const int64_t lane = (panel.at.query - split.first_query(first_panel)) * lane_stride;
    Acc* to = entry_sums + (key - keys.begin) * key_stride + lane;
    with_vectors<Acc>(panel.at.vectors, [&](auto v) {
      constexpr int NV = decltype(v)::count;
      for (int64_t j = 0; j < n; j += kTileKeys) {
        const int64_t n_tile = min_of(kTileKeys, n - j);
        tiles.template compute<NV>(p, panel, key + j, n_tile, key_rows, value_rows, false);
        add<NV>(to + j * key_stride, key + j, n_tile);
        key_rows.base += kTileKeys * key_rows.row_bytes;
        value_rows.base += kTileKeys * value_rows.row_bytes;
      }
    });
  }

  template <int NV>
  void add(Acc* to, int64_t key, int64_t n) {
    Vec<Acc> column[NV] = {};
    tiles.template each_row<NV>(p, panel, key, n, [&](int64_t j, const auto&, const auto& grad) {
#pragma GCC unroll 2
      for (int i = 0; i < Rules::kDepth; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) {
          if (split.one_column) column[v] += grad[i][v];
          else add_vector(to + (j + i) * key_stride + v * W * lane_stride, grad[i][v]);
        }
    });
    for (int v = 0; v < NV && split.one_column; ++v) add_vector(to + v * W * lane_stride, column[v]);
  }
  MHA_INLINE void add_vector(Acc* sum, Vec<Acc> x) { store<Acc>(sum, load<Acc>(sum) + x); }

  void write() const {
    const MatrixWriter<T> out(p.batch, split.heads.entry(matrix, 0), p.grad_bias);
    const int64_t first = split.first_query(first_panel);
    const int64_t n = split.one_row ? 1 : min_of(split.first_query(end_panel), p.queries) - first;
    if (split.one_row) {
      for (int64_t j = keys.begin; j < (split.one_column ? 1 : keys.end); ++j)
        *out.row(0).from(j).p = narrow<T>(lane_sum<Acc>(load<Acc>(sums + (j - keys.begin) * key_stride)));
    } else if (split.one_column) {
      for (int64_t i = 0; i < n; ++i) *out.row(first + i).p = narrow<T>(sums[i]);
    } else {
      for (int64_t i = 0; i < n; i += W)
        for (int64_t j = keys.begin; j < keys.end; j += W)
          write_transposed<T>(out, first + i, j, static_cast<int>(min_of(W, n - i)),
                              static_cast<int>(min_of(W, keys.end - j)), sums + (j - keys.begin) * key_stride + i,
                              key_stride, splat(Acc{1}));
    }
  }
};

template <class T, class Word>
struct FusedBiasBackwardOf {
  using Acc = accumulate_t<T>;

  static int64_t tasks(const FusedBackward& p) { return BiasSplit<Acc>(p).tasks(); }

  static void run(const FusedBackward& p, int64_t begin, int64_t end) {
    const BiasSplit<Acc> split(p);
    const WordSession<Word> session;
    for (int64_t task = begin; task < end; ++task) BiasTask<T, Word>(p, split, task).run();
  }
};

template <class T>
struct FusedBiasBackwardKernel : FusedBiasBackwardOf<T, typename FusedWord<T>::type> {};
