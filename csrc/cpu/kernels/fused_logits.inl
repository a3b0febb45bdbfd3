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
  bool scaled;              // the tile gets logits; else it keeps scores
  bool hidden_have_weight;  // hidden keys have weight (mask_value is finite): no tile may be skipped
  double unit;              // what one unit of the tile means in the exponent of e

  Logits() = default;
  Logits(const Attention& p, int64_t entry)
      : visibility(visibility_of(p.visibility, p.batch, entry, p.keys)),
        bias(p.batch, entry, p.bias),
        key_count(p.keys),
        scale(to_finite<Acc>(p.scale)),
        softcap(softcap_in<Acc>(p.softcap)),
        hidden(to_finite<Acc>(p.mask_value)),
        scaled(needs_scaling(p)),
        hidden_have_weight(hidden != kMinusInfinity),
        unit(unit_of(p)) {}

  // A scale that is zero, negative or at the ends of the range of numbers takes the plain way too.
  static bool needs_scaling(const Attention& p) {
    const bool ordinary = p.scale > 1e-30 && p.scale < 1e30;
    return p.softcap != 0 || p.bias || p.sinks || p.mask_value != -__builtin_inf() || !ordinary;
  }
  static double unit_of(const Attention& p) { return needs_scaling(p) ? 1.0 : p.scale; }

  // Keys that the panel has to look at.
  KeyRange keys(const PanelReach<Acc>& reach) const { return hidden_have_weight ? KeyRange{0, key_count} : reach.some; }

  TileKind kind(const QueryPanel& panel, const PanelReach<Acc>& reach, int64_t key, int64_t n) const {
    const int64_t end = key + n;
    if (!hidden_have_weight && (end <= reach.some.begin || reach.some.end <= key)) return TileKind::hidden;
    const TileKind by_mask = visibility.mask ? kind_by_mask(panel, key, n) : TileKind::open;
    if (by_mask == TileKind::hidden) return hidden_have_weight ? TileKind::mixed : TileKind::hidden;
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

  // Which of up to W keys one vector of queries sees.
  struct Shown {
    bool by_mask, by_range;
    VecMask<Acc> seen;  // see each_block()
    LaneRange<Acc> range;

    MHA_INLINE_MEMBER Vec<Acc> choose(int i, Vec<Acc> x, Acc hidden) const {
      if (by_mask) x = select<Acc>((seen >> i & 1) != 0, x, splat(hidden));
      if (by_range) x = select<Acc>(range.holds(i), x, splat(hidden));
      return x;
    }
  };

  MHA_INLINE_MEMBER Shown shown_keys(const PanelReach<Acc>& reach, TileKind kind, int v, int64_t key, int count,
                                     VecMask<Acc> seen) const {
    Shown shown;
    const bool masked = kind == TileKind::mixed;
    shown.by_mask = masked && visibility.mask;
    shown.seen = seen;
    shown.by_range = masked && !(reach.every.begin <= key && key + count <= reach.every.end);
    if (shown.by_range) shown.range = reach.lanes_from(key, count, v);
    return shown;
  }

  // Turns the scores of keys [key, key + n) into logits; max: the largest of each lane so far.
  void apply(const QueryPanel& panel, const PanelReach<Acc>& reach, TileKind kind, Acc* tile, int64_t stride,
             int64_t key, int64_t n, Acc* max) const {
    for (int v = 0; v < panel.vectors; ++v) {
      Vec<Acc> top = load<Acc>(max + v * W);
      each_block(panel, kind, v, key, n, [&](int64_t j, int count, VecMask<Acc> seen) {
        const Shown shown = shown_keys(reach, kind, v, key + j, count, seen);
        top = apply_block(panel, shown, tile + j * stride + v * W, stride, v, key + j, count, top);
      });
      store<Acc>(max + v * W, top);
    }
  }

  // f(j, count, seen) for blocks of up to W keys key + j ... of one vector of queries. Bit i of a lane of `seen`: its
  // query's mask shows key i of the block. So the mask needs no transpose.
  template <class F>
  MHA_INLINE_MEMBER void each_block(const QueryPanel& panel, TileKind kind, int v, int64_t key, int64_t n,
                                    F&& f) const {
    constexpr int kBits = RowMask<Acc>::kBits;
    const bool masked = kind == TileKind::mixed && visibility.mask;
    VecMask<Acc> seen = {};
    for (int64_t j = 0; j < n; j += W) {
      if (masked && j % kBits == 0) seen = mask_bits(panel, v, key + j, static_cast<int>(min_of(kBits, n - j)));
      f(j, static_cast<int>(min_of(W, n - j)), seen);
      seen >>= W;
    }
  }

  VecMask<Acc> mask_bits(const QueryPanel& panel, int v, int64_t key, int n) const {
    using Lane = std::remove_reference_t<decltype(VecMask<Acc>{}[0])>;
    VecMask<Acc> bits = {};
    if (visibility.mask_row_stride == 0) return bits + static_cast<Lane>(mask_row<Acc>(visibility, 0).bits(key, n));
    for (int i = 0; i < W; ++i)
      bits[i] = mask_row<Acc>(visibility, panel.query + min_of(v * W + i, panel.lanes - 1)).bits(key, n);
    return bits;
  }

  // Up to W keys of one vector of queries.
  __attribute__((noinline)) Vec<Acc> apply_block(const QueryPanel& panel, const Shown& shown, Acc* tile, int64_t stride,
                                                 int v, int64_t key, int count, Vec<Acc> top) const {
    if (!scaled) return hide_block(shown, tile, stride, count, top);
    Vec<Acc> added[W];
    if (bias) read_bias(panel, v, key, count, added);
    for (int i = 0; i < count; ++i, tile += stride) {
      Vec<Acc> x = load<Acc>(tile);
      x *= scale;
      if (softcap != 0) x = softcap * vec_tanh<Acc>(x / softcap);
      if (bias) x += added[i];
      x = shown.choose(i, x, hidden);
      store<Acc>(tile, x);
      top = vec_max(x, top);
    }
    return top;
  }

  // The same where the scores stay as they are and some keys are hidden.
  MHA_INLINE_MEMBER Vec<Acc> hide_block(const Shown& shown, Acc* tile, int64_t stride, int count, Vec<Acc> top) const {
    for (int i = 0; i < count; ++i, tile += stride) {
      const Vec<Acc> x = shown.choose(i, load<Acc>(tile), hidden);
      store<Acc>(tile, x);
      top = vec_max(x, top);
    }
    return top;
  }

  // dx/ds of the scores s that apply() will turn into logits x: 1 - tanh(scale * s / softcap)^2 (1 if not `capped`),
  // and 0 for hidden keys, whose logit is a constant.
  void slopes(const QueryPanel& panel, const PanelReach<Acc>& reach, TileKind kind, const Acc* tile, Acc* out,
              int64_t stride, int64_t key, int64_t n, bool capped) const {
    for (int v = 0; v < panel.vectors; ++v)
      each_block(panel, kind, v, key, n, [&](int64_t j, int count, VecMask<Acc> seen) {
        const Shown shown = shown_keys(reach, kind, v, key + j, count, seen);
        const int64_t at = j * stride + v * W;
        slopes_block(shown, tile + at, out + at, stride, count, capped && softcap != 0);
      });
  }

  __attribute__((noinline)) void slopes_block(const Shown& shown, const Acc* tile, Acc* out, int64_t stride, int count,
                                              bool capped) const {
    for (int i = 0; i < count; ++i, tile += stride, out += stride) {
      const Vec<Acc> slope = capped ? tanh_slope<Acc>(load<Acc>(tile) * scale / softcap) : splat(Acc{1});
      store<Acc>(out, shown.choose(i, slope, 0));
    }
  }

  // What apply() will read of bias and mask, where it is large enough to lie far away.
  Prefetcher ahead(const QueryPanel& panel, int64_t key, int64_t n) const {
    if (bias && bias.row_stride && bias.col_stride == 1)
      return Prefetcher::of(Factor<T>{bias.row(panel.query).from(key).p, bias.row_stride, 1, panel.lanes, n});
    if (visibility.mask && visibility.mask_row_stride && visibility.mask_col_stride == 1)
      return Prefetcher::of(Factor<uint8_t>{mask_row<Acc>(visibility, panel.query).from(key).p,
                                            visibility.mask_row_stride, 1, panel.lanes, n});
    return {};
  }

  void read_bias(const QueryPanel& panel, int v, int64_t key, int count, Vec<Acc> (&keys)[W]) const {
    if (bias.row_stride == 0) {
      for (int i = 0; i < count; ++i) keys[i] = splat(widen(bias.p[(key + i) * bias.col_stride]));
    } else {
      read_transposed<Acc>([&](int64_t query, int n) { return bias.row(query).from(key).read(0, n); }, panel, v, count,
                           keys);
    }
  }
};
