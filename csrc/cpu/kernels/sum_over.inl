// Sum over broadcast dimensions in a fixed order: the gradient of a bias has the bias's own shape. core/sum_plan.h
// says how the sum is cut; a task adds its terms, runs of neighbouring elements, pairwise in chunks.

// Up to SumPlan::kWidth results next to each other, or a single one.
template <class T>
struct SumBlock {
  using Acc = accumulate_t<T>;
  static constexpr int L = kLanes<Acc>;
  // Terms added one after the other before sums are added pairwise: few, since each adds a rounding error, but enough
  // that the stack's own additions cost little (one in 32).
  static constexpr int64_t kChunk = 32;

  const SumPlan& plan;
  const T* x;
  RowWriter<T> out;
  int64_t width;    // elements of the longest run
  int64_t results;  // width if the inner dimension is kept, else 1

  SumBlock(const SumOver& p, const SumPlan& sum_plan, int64_t block) : plan(sum_plan) {
    const int64_t pieces = plan.inner.kept ? plan.pieces : 1, entry = block / pieces;
    const int64_t first = block % pieces * SumPlan::kWidth;
    x = static_cast<const T*>(p.x.data) + batch_offset(plan.kept, entry, plan.kept_x) + first * plan.inner.x_stride;
    out.p = static_cast<T*>(p.out.data) + batch_offset(plan.kept, entry, plan.kept_out) + first * plan.inner.out_stride;
    out.stride = plan.inner.out_stride;
    width = min_of(SumPlan::kWidth, plan.inner.size - first);
    results = plan.inner.kept ? width : 1;
  }

  RowReader<T> term(int64_t index) const {
    const int64_t pieces = plan.inner.kept ? 1 : plan.pieces;
    const int64_t offset = batch_offset(plan.summed, index / pieces, plan.summed_x);
    return {x + offset + index % pieces * SumPlan::kWidth * plan.inner.x_stride, plan.inner.x_stride};
  }

  int64_t term_width(int64_t index) const {
    if (plan.inner.kept) return width;
    return min_of(SumPlan::kWidth, plan.inner.size - index % plan.pieces * SumPlan::kWidth);
  }

  // Sums of terms [begin, end) in scratch. A stack of partial sums: each chunk goes on top, and as long as the top two
  // stand for equally many terms they are added.
  const Acc* add_terms(int64_t begin, int64_t end) const {
    const int64_t padded = round_up(width, L);
    int64_t depth = 0, most = 2;
    for (int64_t chunks = ceil_div(end - begin, kChunk); chunks > 0; chunks /= 2) ++most;
    Acc* stack = static_cast<Acc*>(scratch(static_cast<size_t>(most * padded) * sizeof(Acc)));
    std::memset(stack, 0, static_cast<size_t>(padded) * sizeof(Acc));
    for (int64_t index = begin; index < end;) {
      Acc* top = stack + depth++ * padded;
      std::memset(top, 0, static_cast<size_t>(padded) * sizeof(Acc));
      for (const int64_t stop = min_of(end, index + kChunk); index < stop; ++index)
        add(top, term(index), term_width(index));
      for (int64_t chunks = ceil_div(index - begin, kChunk); chunks % 2 == 0; chunks /= 2, --depth)
        add(stack + (depth - 2) * padded, RowReader<Acc>{stack + (depth - 1) * padded, 1}, padded);
    }
    for (; depth > 1; --depth)
      add(stack + (depth - 2) * padded, RowReader<Acc>{stack + (depth - 1) * padded, 1}, padded);
    return stack;
  }

  template <class From>
  static void add(Acc* sums, RowReader<From> run, int64_t n) {
    int64_t j = 0;
    for (; j + L <= n; j += L) store<Acc>(sums + j, load<Acc>(sums + j) + run.read(j, L));
    if (j < n) {
      const int rest = static_cast<int>(n - j);
      const Vec<Acc> v = select<Acc>(first_lanes<Acc>(rest), run.read(j, rest), Vec<Acc>{});
      store<Acc>(sums + j, load<Acc>(sums + j) + v);
    }
  }

  template <class To>
  void write(RowWriter<To> to, const Acc* sums) const {
    if (!plan.inner.kept) {
      RowSum<Acc> total;
      for (int64_t j = 0; j < width; j += L) total.add(load<Acc>(sums + j));
      *to.p = narrow<To>(total.total());
      return;
    }
    int64_t j = 0;
    for (; j + L <= width; j += L) to.write(j, L, load<Acc>(sums + j));
    if (j < width) to.write(j, static_cast<int>(width - j), load<Acc>(sums + j));
  }
};

template <class T>
struct SumOverKernel {
  using Acc = accumulate_t<T>;

  static int64_t parts(const SumOver& p, const SumPlan& plan) { return p.partials ? plan.parts() : 1; }

  static int64_t tasks(const SumOver& p) {
    const SumPlan plan = sum_plan(p);
    return plan.blocks() * parts(p, plan);
  }

  static void run(const SumOver& p, int64_t begin, int64_t end) {
    const SumPlan plan = sum_plan(p);
    const int64_t n_parts = parts(p, plan), terms = plan.terms();
    for (int64_t task = begin; task < end; ++task) {
      const SumBlock<T> block(p, plan, task / n_parts);
      const int64_t part = task % n_parts;
      const Acc* sums = block.add_terms(terms * part / n_parts, terms * (part + 1) / n_parts);
      if (p.partials) {
        const RowWriter<Acc> partial{static_cast<Acc*>(p.partials) + task * plan.results_per_block(), 1};
        block.write(partial, sums);
      } else {
        block.write(block.out, sums);
      }
    }
  }
};

// Second phase, when the terms of a block were shared out: adds the parts in order.
template <class T>
struct SumPartialsKernel {
  using Acc = accumulate_t<T>;

  static int64_t tasks(const SumOver& p) { return p.partials ? sum_plan(p).blocks() : 0; }

  static void run(const SumOver& p, int64_t begin, int64_t end) {
    const SumPlan plan = sum_plan(p);
    const int64_t parts = plan.parts(), stride = plan.results_per_block();
    for (int64_t b = begin; b < end; ++b) {
      const SumBlock<T> block(p, plan, b);
      const Acc* partials = static_cast<const Acc*>(p.partials) + b * parts * stride;
      for (int64_t j = 0; j < block.results; ++j) {
        Acc sum = 0;
        for (int64_t part = 0; part < parts; ++part) sum += partials[part * stride + j];
        block.out.p[j * block.out.stride] = narrow<T>(sum);
      }
    }
  }
};
