// The sums of the fused backward: where dQ, dK and dV of a part grow, what is added to them, and how they are written.
//   dQ^T  elements of the head x queries, a slot for each panel
//   dK    keys x elements of the head, dV alike

// Factors of the products for dK and dV: what belongs to the queries of a group, [lane][element of the head].
template <class Word>
struct LaneRows {
  const Word* data;
  int64_t stride;  // from one word of lanes to the next
};

// P or dS of a block of keys for the queries of a group.
template <class Element>
struct KeyRows {
  Element* data;  // [key][lane of the group]
  int64_t stride;

  Element* at(int64_t row, int64_t lane) const { return data + row * stride + lane; }
};

template <class T, class Word>
struct BackwardSums {
  using Acc = accumulate_t<T>;
  using Rules = WordRules<Word>;
  using Element = typename Rules::Element;
  using Panel = GradPanel<T, Word>;
  static constexpr int W = kLanes<Acc>;
  static constexpr int64_t kGroupLanes = BackwardPlan::kQueries;
  // Words of a group's lanes as depth, with room behind them for a whole tile that begins anywhere.
  static constexpr int64_t kLaneWords = (kGroupLanes + Rules::kDepthMultiple) / Rules::kDepth;

  const FusedBackward& p;
  const BackwardPart part;
  const int64_t head_panels;
  const bool in_workspace;   // other waves come before or after
  const int64_t query_slot;  // Rows of dQ^T, too, are a whole number of tiles.
  Acc *query = nullptr, *key = nullptr, *value = nullptr;

  BackwardSums(const FusedBackward& problem, const BackwardSplit<Acc>& split, const BackwardPart& which)
      : p(problem),
        part(which),
        head_panels(split.head_panels),
        in_workspace(!(part.first && part.last)),
        query_slot(round_up(p.head_dim, Rules::kDepthMultiple) * Panel::kStride) {
    if (!in_workspace) return;
    const BackwardPlan& plan = split.plan;
    query = static_cast<Acc*>(p.workspace) + part.slot * plan.head_sums();
    key = query + plan.query_sums + part.keys.begin * row_stride(p.head_dim);
    value = query + plan.query_sums + plan.key_sums + part.keys.begin * row_stride(p.value_dim);
  }

  int64_t keys() const { return part.keys.end - part.keys.begin; }
  static int64_t row_stride(int64_t columns) { return round_up(columns, W) + Rules::kPanelPadding; }

  void take(Room& room) {
    if (in_workspace) return;
    const int64_t rows = round_up(keys(), Rules::kDepthMultiple);
    query = room.take<Acc>(kGroupPanels<Acc> * query_slot);  // one group after another
    key = room.take<Acc>(rows * row_stride(p.head_dim));
    value = room.take<Acc>(rows * row_stride(p.value_dim));
  }

  // Panel `index` of a query head, number i of its group.
  Acc* query_sums(int64_t entry, int64_t index, int64_t i) const {
    return query + query_slot * (in_workspace ? (entry - part.head * p.group) * head_panels + index : i);
  }

  void clear_keys() const {
    if (part.want_key) clear(key, keys() * row_stride(p.head_dim));
    if (part.want_value) clear(value, keys() * row_stride(p.value_dim));
  }
  void clear_queries(Acc* sums) const { clear(sums, query_slot); }
  static void clear(Acc* sums, int64_t n) { std::memset(sums, 0, sizeof(Acc) * static_cast<size_t>(n)); }

  // dQ^T += K^T dS^T for one panel.
  template <int NV>
  void add_to_queries(Acc* sums, const RowFactor& key_columns, const Word* grads, int64_t grads_stride,
                      int64_t n) const {
    constexpr int64_t kStride = NV * W + Rules::kPanelPadding;
    SumSink<Acc> sink{{p.head_dim, NV * W, sums, kStride, true}};
    PanelRows<Word>::template run<NV>(sink, key_columns, grads, grads_stride, 0, ceil_div(n, Rules::kDepth));
  }

  // sums[row] += rows[row][lanes] * factor[lanes], for rows `keys` of a block and neighbouring lanes.
  void add_to_keys(Acc* sums, int64_t columns, const KeyRows<Element>& rows, KeyRange keys, KeyRange lanes,
                   const LaneRows<Word>& factor) const {
    const int64_t stride = row_stride(columns), first = lanes.begin / Rules::kDepth;
    constexpr int64_t kElement = sizeof(Element), kWord = sizeof(Word);
    const RowFactor left = {reinterpret_cast<const char*>(rows.at(keys.begin, lanes.begin)),
                            rows.stride * kElement,
                            kWord,
                            INT32_MAX,
                            0,
                            false};
    const PanelSpread spread = PanelSpread::of<Acc>(columns);
    for (int64_t panel = 0; panel < spread.panels; ++panel) {
      const int64_t vector = spread.first_vector(panel), j = vector * W;
      with_vectors<Acc>(spread.first_vector(panel + 1) - vector, [&](auto v) {
        constexpr int NV = decltype(v)::count;
        SumSink<Acc> sink{{keys.end - keys.begin, NV * W, sums + keys.begin * stride + j, stride, true}};
        PanelRows<Word>::template run<NV>(sink, left, factor.data + first * factor.stride + j, factor.stride, 0,
                                          ceil_div(lanes.end - lanes.begin, Rules::kDepth));
      });
    }
  }

  // The factor from columns (elements of the head) x depth (lanes), in place where the micro-kernel can read it there.
  static LaneRows<Word> lane_rows(const Factor<T>& f, Word* room) {
    if constexpr (std::is_same_v<T, Word>) {
      const bool crowded = f.depth_stride * static_cast<int64_t>(sizeof(T)) % kCrowdedBytes == 0;
      if (f.stride == 1 && f.count % W == 0 && !crowded) return {f.data, f.depth_stride};
    }
    const int64_t stride = row_stride(f.count), used = ceil_div(f.depth, Rules::kDepth);
    Rules::pack_by_depth(f, room, stride);
    if constexpr (Rules::kDepthMultiple > Rules::kDepth)
      std::memset(room + used * stride, 0, sizeof(Word) * static_cast<size_t>((kLaneWords - used) * stride));
    return {room, stride};
  }

  // "Zero hides", where products were made with keep_finite(): what they left out, where the weight is not zero.
  void add_unbounded_to_queries(Acc* sums, int64_t stride, const Factor<T>& key_columns, const KeyRows<Element>& grads,
                                int64_t lane, int vectors) const {
    for (int64_t j = 0; j < key_columns.depth; ++j)
      for (int64_t d = 0; d < key_columns.count; ++d) {
        const T x = key_columns.data[j * key_columns.depth_stride + d * key_columns.stride];
        if (is_finite(x)) continue;
        for (int v = 0; v < vectors; ++v) {
          const Vec<Acc> weight = load<Element>(grads.at(j, lane + v * W));
          Acc* out = sums + d * stride + v * W;
          store<Acc>(out, load<Acc>(out) + select<Acc>(weight == 0, Vec<Acc>{}, weight * widen(x)));
        }
      }
  }
  void add_unbounded_to_keys(Acc* sums, const KeyRows<Element>& rows, KeyRange keys, KeyRange lanes,
                             const Factor<T>& factor) const {
    const int64_t stride = row_stride(factor.count);
    for (int64_t lane = lanes.begin; lane < lanes.end; ++lane)
      for (int64_t d = 0; d < factor.count; ++d) {
        const T x = factor.data[lane * factor.depth_stride + d * factor.stride];
        if (is_finite(x)) continue;
        for (int64_t j = keys.begin; j < keys.end; ++j) {
          const Acc weight = widen(*rows.at(j, lane));
          if (weight != 0) sums[j * stride + d] += weight * widen(x);
        }
      }
  }

  // The results, times `factor`. Both return whether all are finite.
  bool write_queries(const Acc* sums, const QueryPanel& panel) const {
    const MatrixWriter<T> out(p.batch, panel.entry, p.grad_query);
    const int64_t stride = panel.vectors * W + Rules::kPanelPadding;
    bool finite = true;
    for (int v = 0; v < panel.vectors; ++v)
      for (int64_t d = 0; d < p.head_dim; d += W) {
        const int lanes = static_cast<int>(min_of(W, panel.lanes - v * W));
        const int size = static_cast<int>(min_of(W, p.head_dim - d));
        finite &= write_transposed<T>(out, panel.query + v * W, d, lanes, size, sums + d * stride + v * W, stride,
                                      splat(to_finite<Acc>(p.scale)));
      }
    return finite;
  }

  bool write_keys(const Output& stack, const Acc* sums, int64_t columns, Acc factor) const {
    const MatrixWriter<T> out(p.batch, part.head * p.group, stack);
    Vec<Acc> probe = {};
    for (int64_t j = 0; j < keys(); ++j, sums += row_stride(columns)) {
      const RowWriter<T> row = out.row(part.keys.begin + j);
      for (int64_t d = 0; d < columns; d += W) {
        const Vec<Acc> x = load<Acc>(sums + d) * factor;
        row.write(d, static_cast<int>(min_of(W, columns - d)), x);
        probe = mul_add(x, Vec<Acc>{}, probe);
      }
    }
    return lane_sum<Acc>(probe) == 0;
  }
};
