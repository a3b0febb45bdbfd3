// Which way the fused forward goes.

// The panels of a task, by OnlineTask or WeightsTask.
template <class Task>
struct PanelForward {
  using Acc = typename Task::Acc;

  static ForwardSplit split(const FusedForward& p) {
    const int64_t entries = p.batch.count() / max_of(1, p.group);
    return ForwardSplit::of<Acc>(p, p.group, entries, Task::panels_at_most(p), Partials<Acc>(p).parts);
  }
  static int64_t tasks(const FusedForward& p) { return split(p).tasks(); }

  static void run(const FusedForward& p, int64_t begin, int64_t end) {
    const WordSession<typename Task::PanelWord> session;
    for (int64_t task = begin; task < end; ++task) run_task(p, task);
  }

  static void run_task(const FusedForward& p, int64_t task) {
    const ForwardSplit s = split(p);
    const PanelPortion panels = s.portion(task / s.key_parts);
    run_share(p, s, {panels.entry, panels.first, panels.count, {task % s.key_parts, s.key_parts}});
  }

  // Panels whose output is not finite are done again, in case what spoilt them was hidden.
  static void run_share(const FusedForward& p, const ForwardSplit& s, const ForwardShare& share) {
    Task forward(p, s, share, false);
    forward.run();
    bool spoilt[kTaskPanels] = {};  // kept apart: the next task takes over the scratch memory
    for (int i = 0; i < share.count; ++i) spoilt[i] = forward.panels[i].spoilt;
    for (int i = 0; i < share.count; ++i)
      if (spoilt[i])
        Task(p, s, {share.kv_entry, share.first + i, 1, share.part, &forward.keys, share.weight_sums}, true).run();
  }
};

// With the mean of the weights over the heads. A task has the same panels of all query heads of a batch entry and goes
// through the heads in order, so the order of additions is fixed, and its sums are the only weights in memory.
template <class T, class Word>
struct AverageForward {
  using Task = WeightsTask<T, Word>;
  using Acc = typename Task::Acc;
  static constexpr int W = kLanes<Acc>;
  static constexpr int64_t kStride = Task::kLanesAtMost;  // of the sums, [panel][key][lane]

  static ForwardSplit split(const FusedForward& p) {
    return ForwardSplit::of<Acc>(p, 1, p.batch.count() / p.heads, Task::panels_at_most(p), 1);
  }
  static int64_t tasks(const FusedForward& p) { return split(p).tasks(); }

  static void run(const FusedForward& p, int64_t begin, int64_t end) {
    const WordSession<Word> session;
    for (int64_t task = begin; task < end; ++task) run_task(p, split(p), task);
  }

  static void run_task(const FusedForward& p, const ForwardSplit& s, int64_t task) {
    const PanelPortion panels = s.portion(task);
    const size_t bytes = static_cast<size_t>(panels.count * p.keys * kStride) * sizeof(Acc);
    Acc* const sums = static_cast<Acc*>(kept_scratch(bytes));
    std::memset(sums, 0, bytes);
    for (int64_t head = 0; head < p.heads; ++head) {
      const int64_t entry = panels.entry * p.heads + head, first = entry % p.group * s.head_panels + panels.first;
      PanelForward<Task>::run_share(p, s, {entry / p.group, first, panels.count, {0, 1}, nullptr, sums});
    }
    for (int64_t i = 0; i < panels.count; ++i)
      write(p, query_panel<Acc>(p, panels.entry * p.heads, panels.first + i), sums + i * p.keys * kStride);
  }

  static void write(const FusedForward& p, const QueryPanel& at, const Acc* sums) {
    const MatrixWriter<T> weights(p.batch, at.entry, p.weights);
    const Vec<Acc> share = splat(Acc{1} / static_cast<Acc>(p.heads));
    for (int v = 0; v < at.vectors; ++v) {
      const int lanes = static_cast<int>(min_of(W, at.lanes - v * W));
      for (int64_t key = 0; key < p.keys; key += W)
        write_transposed(weights, at.query + v * W, key, lanes, static_cast<int>(min_of(W, p.keys - key)),
                         sums + key * kStride + v * W, kStride, share);
    }
  }
};

template <class T, class Word>
struct FusedForwardOf {
  using Online = PanelForward<OnlineTask<T, Word>>;
  using Weights = PanelForward<WeightsTask<T, Word>>;
  using Average = AverageForward<T, Word>;
  using Decode = DecodeForward<T>;

  // Panels cost the same for one query as for a register of them. But a backward that needs the row statistics
  // computes the scores with panels, and e^(s - row_max) is only right for scores and maxima that were rounded alike.
  static bool few_queries(const FusedForward& p) {
    return p.queries <= min_of(FusedPlan::kFewQueries, kLanes<accumulate_t<T>> / 2) && !p.row_max;
  }

  static Kernel<FusedForward> choice(const FusedForward& p) {
    if (p.average) return {&Average::tasks, &Average::run};
    if (few_queries(p)) return {&Decode::tasks, &Decode::run};
    if (p.weights) return {&Weights::tasks, &Weights::run};
    return {&Online::tasks, &Online::run};
  }

  static int64_t tasks(const FusedForward& p) { return choice(p).tasks(p); }
  static void run(const FusedForward& p, int64_t begin, int64_t end) { choice(p).run(p, begin, end); }
};

template <class T>
struct FusedForwardKernel : FusedForwardOf<T, typename FusedWord<T>::type> {};
