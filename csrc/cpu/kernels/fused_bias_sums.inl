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

// The sums of a task over its series of heads, [panel][key][lane]. False where a series is one head: that one's tiles
// are written at once.
template <class T>
class BiasSums {
 public:
  using Acc = accumulate_t<T>;
  static constexpr int W = kLanes<Acc>;
  static constexpr int64_t kLanesAtMost = kPanelVectors<Acc> * W;

  // `part`: of the first head, whose matrix of the bias the others share.
  BiasSums(const FusedBackward& problem, const BackwardSplit<Acc>& s, const BackwardPart& part)
      : p(problem), split(s), first(part) {
    if (split.plan.series == 1) return;
    const int64_t size = first.groups * kGroupPanels<Acc> * panel_size();
    sums = static_cast<Acc*>(kept_scratch(static_cast<size_t>(size) * sizeof(Acc)));
    std::memset(sums, 0, static_cast<size_t>(size) * sizeof(Acc));
  }

  explicit operator bool() const { return sums != nullptr; }

  // Rows `rows` of `grads`, counted from `key` on; `panel` is the part's `number`-th.
  template <class Element>
  void add(const QueryPanel& panel, int64_t number, int64_t key, const KeyRows<Element>& grads, KeyRange rows) const {
    Acc* to = of_panel(number) + (key - first.keys.begin + rows.begin) * kLanesAtMost;
    for (int64_t j = rows.begin; j < rows.end; ++j, to += kLanesAtMost)
      for (int v = 0; v < panel.vectors; ++v)
        store<Acc>(to + v * W, load<Acc>(to + v * W) + load<Element>(grads.at(j, v * W)));
  }

  void write() const {
    const int64_t n = first.keys.end - first.keys.begin;
    for (int64_t i = 0; i < first.groups; ++i) {
      const PanelGroup group = split.group(p, first.head, first.first_group + i);
      for (int j = 0; j < group.count; ++j)
        write_grad_bias<T>(p, query_panel<Acc>(p, group.entry, group.first + j), first.keys.begin, n,
                           KeyRows<Acc>{of_panel(i * kGroupPanels<Acc> + j), kLanesAtMost}, {0, n});
    }
  }

 private:
  int64_t panel_size() const { return (first.keys.end - first.keys.begin) * kLanesAtMost; }
  Acc* of_panel(int64_t number) const { return sums + number * panel_size(); }

  const FusedBackward& p;
  const BackwardSplit<Acc>& split;
  const BackwardPart first;
  Acc* sums = nullptr;
};
