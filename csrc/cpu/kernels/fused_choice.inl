// Which way the fused forward goes.

// The panels of a task, by OnlineTask or WeightsTask.
template <class Task>
struct PanelForward {
  using Acc = typename Task::Acc;

  static ForwardSplit split(const FusedForward& p) {
    return ForwardSplit::of<Acc>(p, Task::panels_at_most(p), Partials<Acc>(p).parts);
  }
  static int64_t tasks(const FusedForward& p) { return split(p).tasks(); }

  static void run(const FusedForward& p, int64_t begin, int64_t end) {
    const WordSession<typename Task::PanelWord> session;
    for (int64_t task = begin; task < end; ++task) run_task(p, task);
  }

  // Panels whose output is not finite are done again, in case what spoilt them was hidden.
  static void run_task(const FusedForward& p, int64_t task) {
    const ForwardSplit s = split(p);
    const KeyPart part_of_keys{task % s.key_parts, s.key_parts};
    const int64_t of_queries = task / s.key_parts;
    // Later queries first: with causality they see more keys, and long tasks should not come last.
    const int64_t entry = of_queries / s.parts, part = s.parts - 1 - of_queries % s.parts;
    const int64_t first = s.panels * part / s.parts, count = s.panels * (part + 1) / s.parts - first;
    Task forward(p, s, {entry, first, count, part_of_keys}, false);
    forward.run();
    bool spoilt[kTaskPanels] = {};  // kept apart: the next task takes over the scratch memory
    for (int i = 0; i < count; ++i) spoilt[i] = forward.panels[i].spoilt;
    for (int i = 0; i < count; ++i)
      if (spoilt[i]) Task(p, s, {entry, first + i, 1, part_of_keys, &forward.keys}, true).run();
  }
};

template <class T, class Word>
struct FusedForwardOf {
  using Online = PanelForward<OnlineTask<T, Word>>;
  using Weights = PanelForward<WeightsTask<T, Word>>;
  using Decode = DecodeForward<T>;

  // Panels cost the same for one query as for a register of them. But a backward that needs the row statistics
  // computes the scores with panels, and e^(s - row_max) is only right for scores and maxima that were rounded alike.
  static bool few_queries(const FusedForward& p) {
    return p.queries <= min_of(FusedPlan::kFewQueries, kLanes<accumulate_t<T>> / 2) && !p.row_max;
  }

  static int64_t tasks(const FusedForward& p) {
    return few_queries(p) ? Decode::tasks(p) : p.weights ? Weights::tasks(p) : Online::tasks(p);
  }
  static void run(const FusedForward& p, int64_t begin, int64_t end) {
    (few_queries(p) ? Decode::run : p.weights ? Weights::run : Online::run)(p, begin, end);
  }
};

template <class T>
struct FusedForwardKernel : FusedForwardOf<T, typename FusedWord<T>::type> {};
