// From scores to logits, on a tile: x = softcap * tanh(scale * s / softcap) + bias, hidden keys get mask_value.
//
// With none of those options the tile is left as it is, and the scale waits for the exponential:
// e^(scale (s - m)) is one multiplication less. `unit` says which of the two the tile holds.

enum class TileKind { hidden, mixed, open };  // no key visible, some, all

template <class T>
struct Logits {
  using Acc = accumulate_t<T>;
  static constexpr int W = kLanes<Acc>;
  static constexpr Acc kMinusInfinity = -static_cast<Acc>(__builtin_inf());

  BatchVisibility visibility;
  MatrixReader<T> bias;
  int64_t key_count;
  Acc scale, softcap, hidden;
  bool scaled;        // the tile gets logits; else it keeps scores
  bool hidden_count;  // hidden keys have weight (mask_value is finite): no tile may be skipped
  double unit;        // what one unit of the tile means in the exponent of e

  Logits() = default;
  Logits(const Attention& p, int64_t entry)
      : visibility(visibility_of(p.visibility, p.batch, entry, p.keys)),
        bias(p.batch, entry, p.bias),
        key_count(p.keys),
        scale(to_finite<Acc>(p.scale)),
        softcap(softcap_in<Acc>(p.softcap)),
        hidden(to_finite<Acc>(p.mask_value)),
        scaled(needs_scaling(p)),
        hidden_count(hidden != kMinusInfinity),
        unit(unit_of(p)) {}

  // A scale that is zero, negative or at the ends of the range of numbers takes the plain way too.
  static bool needs_scaling(const Attention& p) {
    const bool ordinary = p.scale > 1e-30 && p.scale < 1e30;
    return p.softcap != 0 || p.bias || p.sinks || p.mask_value != -__builtin_inf() || !ordinary;
  }
  static double unit_of(const Attention& p) { return needs_scaling(p) ? 1.0 : p.scale; }

  // Keys that the panel has to look at.
  KeyRange keys(const PanelReach<Acc>& reach) const { return hidden_count ? KeyRange{0, key_count} : reach.some; }

  TileKind kind(const QueryPanel& panel, const PanelReach<Acc>& reach, int64_t key, int64_t n) const {
    const int64_t end = key + n;
    if (!hidden_count && (end <= reach.some.begin || reach.some.end <= key)) return TileKind::hidden;
    const TileKind by_mask = visibility.mask ? kind_by_mask(panel, key, n) : TileKind::open;
    if (by_mask == TileKind::hidden) return hidden_count ? TileKind::mixed : TileKind::hidden;
    return reach.every.begin <= key && end <= reach.every.end ? by_mask : TileKind::mixed;
  }

  TileKind kind_by_mask(const QueryPanel& panel, int64_t key, int64_t n) const {
    bool any = false, all = true;
    const int64_t rows = visibility.mask_row_stride ? panel.lanes : 1;
    for (int64_t i = 0; i < rows && (all || !any); ++i) {
      const auto row = mask_row<Acc>(visibility, panel.query + i).from(key).first(n);
      any |= row.any;
      all &= row.all;
    }
    return all ? TileKind::open : any ? TileKind::mixed : TileKind::hidden;
  }

  // Turns the scores of keys [key, key + n) into logits; max: their maximum in each lane.
  template <int NV>
  void apply(const QueryPanel& panel, const PanelReach<Acc>& reach, TileKind kind, Acc* tile, int64_t stride,
             int64_t key, int64_t n, Acc* max) const {
    for (int v = 0; v < NV; ++v) {
      Vec<Acc> top = splat(kMinusInfinity);
      for (int64_t j = 0; j < n; j += W) {
        const int count = static_cast<int>(min_of(W, n - j));
        top = apply_block(panel, reach, kind, tile + j * stride + v * W, stride, v, key + j, count, top);
      }
      store<Acc>(max + v * W, top);
    }
  }

  // Up to W keys of one vector of queries.
  __attribute__((noinline)) Vec<Acc> apply_block(const QueryPanel& panel, const PanelReach<Acc>& reach, TileKind kind,
                                                 Acc* tile, int64_t stride, int v, int64_t key, int count,
                                                 Vec<Acc> top) const {
    Vec<Acc> added[W], seen[W];
    if (bias) read_bias(panel, v, key, count, added);
    const bool masked = kind == TileKind::mixed;
    const bool by_mask = masked && visibility.mask;
    if (by_mask) read_mask(panel, v, key, count, seen);
    const bool by_range = masked && !(reach.every.begin <= key && key + count <= reach.every.end);
    const LaneRange<Acc> range = by_range ? reach.lanes_from(key, count, v) : LaneRange<Acc>{};
    for (int i = 0; i < count; ++i, tile += stride) {
      Vec<Acc> x = load<Acc>(tile);
      if (scaled) x *= scale;
      if (softcap != 0) x = softcap * vec_tanh<Acc>(x / softcap);
      if (bias) x += added[i];
      if (by_mask) x = select<Acc>((VecMask<Acc>)seen[i] != 0, x, splat(hidden));
      if (by_range) x = select<Acc>(range.holds(i), x, splat(hidden));
      store<Acc>(tile, x);
      top = vec_max(x, top);
    }
    return top;
  }

  void read_bias(const QueryPanel& panel, int v, int64_t key, int count, Vec<Acc> (&keys)[W]) const {
    if (bias.row_stride == 0) {
      for (int i = 0; i < count; ++i) keys[i] = splat(widen(bias.p[(key + i) * bias.col_stride]));
    } else {
      read_transposed<Acc>([&](int64_t query, int n) { return bias.row(query).from(key).read(0, n); }, panel, v, count,
                           keys);
    }
  }

  // A lane is all ones where the mask shows the key.
  void read_mask(const QueryPanel& panel, int v, int64_t key, int count, Vec<Acc> (&keys)[W]) const {
    if (visibility.mask_row_stride == 0) {
      for (int i = 0; i < count; ++i) {
        const bool seen = visibility.mask[(key + i) * visibility.mask_col_stride];
        keys[i] = (Vec<Acc>)(VecMask<Acc>{} - seen);
      }
    } else {
      read_transposed<Acc>(
          [&](int64_t query, int n) { return (Vec<Acc>)mask_row<Acc>(visibility, query).from(key).read(0, n); }, panel,
          v, count, keys);
    }
  }
};
