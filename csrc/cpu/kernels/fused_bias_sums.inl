// The gradient of the bias on the way to the others (core/backward_plan.h): a tile of dS, transposed, is a tile of it.
//   dbias[query][key] = sum of dS[key][query] over the heads that share it

// Writes `n` keys of a panel, from `key` on. Rows of `grads` other than `rows` count as zero.
template <class T, class Element, class Acc = accumulate_t<T>>
void write_grad_bias(const FusedBackward& p, const QueryPanel& panel, int64_t key, int64_t n,
                     const KeyRows<Element>& grads, KeyRange rows) {
  constexpr int W = kLanes<Acc>;
  const MatrixWriter<T> out(p.batch, panel.entry, p.grad_bias);
  for (int v = 0; v < panel.vectors; ++v)
    for (int64_t j = 0; j < n; j += W) {
      Acc tile[W * W];
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) {
        const bool is_zero = j + i < rows.begin || j + i >= rows.end;
        store<Acc>(tile + i * W, is_zero ? Vec<Acc>{} : load<Element>(grads.at(j + i, v * W)));
      }
      const int lanes = static_cast<int>(min_of(W, panel.lanes - v * W)), size = static_cast<int>(min_of(W, n - j));
      write_transposed<T>(out, panel.query + v * W, key + j, lanes, size, tile, W, splat(Acc{1}));
    }
}

// The sums of a task over its series of heads, [key][lane], the lanes of all panels of its part side by side. False
// where a series is one head: that one's tiles are written at once.
template <class T>
class BiasSums {
 public:
  using Acc = accumulate_t<T>;
  static constexpr int W = kLanes<Acc>;

  int64_t stride = 0;  // lanes

  // `part`: of the first head, whose matrix of the bias the others share. Tiles run over the last key by fewer than
  // `rows_padded` rows of zeros.
  BiasSums(const FusedBackward& problem, const BackwardSplit<Acc>& s, const BackwardPart& which, int64_t rows_padded)
      : p(problem), split(s), part(which), first_lane(split.first_lane(part.first_group)) {
    if (split.plan.series_length == 1) return;
    stride = split.first_lane(part.first_group + part.groups) - first_lane;
    const int64_t size = (keys() + rows_padded) * stride;
    sums = static_cast<Acc*>(kept_scratch(static_cast<size_t>(size) * sizeof(Acc)));
    std::memset(sums, 0, static_cast<size_t>(size) * sizeof(Acc));
  }

  explicit operator bool() const { return sums != nullptr; }

  // Those of a panel, from the part's first key on; `panel` counts through its query head.
  Acc* of(int64_t group, int64_t panel) const {
    return sums ? sums + split.lane_of(group, panel) - first_lane : nullptr;
  }

  template <int NV>
  MHA_INLINE_MEMBER void add(Acc* panel, int64_t row, const Vec<Acc> (&grads)[NV]) const {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      Acc* sum = panel + row * stride + v * W;
      store<Acc>(sum, load<Acc>(sum) + grads[v]);
    }
  }

  void write() const {
    for (int64_t i = part.first_group; i < part.first_group + part.groups; ++i) {
      const PanelGroup group = split.group(p, part.head, i);
      for (int64_t panel = group.first; panel < group.first + group.count; ++panel)
        write_grad_bias<T>(p, query_panel<Acc>(p, group.entry, panel), part.keys.begin, keys(),
                           KeyRows<Acc>{of(i, panel), stride}, {0, keys()});
    }
  }

 private:
  int64_t keys() const { return part.keys.end - part.keys.begin; }

  const FusedBackward& p;
  const BackwardSplit<Acc>& split;
  const BackwardPart part;
  const int64_t first_lane;
  Acc* sums = nullptr;
};
