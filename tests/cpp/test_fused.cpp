// Fused attention, forward and backward, through the kernel tables: every level of this machine, every element type,
// random sizes, strides, grouped heads and all options at random, against the plain loops of naive_attention.h.
#include <cstring>

#include "../../csrc/core/backward_plan.h"
#include "../../csrc/core/fused_plan.h"
#include "fused_case.h"
#include "levels.h"

namespace {

template <class T>
struct ForwardResults {
  using Acc = accumulate_t<T>;
  FusedForward p;
  Result<T> output, weights;
  Stack<Acc> row_max, row_sum;

  ForwardResults(Random& random, const Attention& problem, bool need_weights, bool need_statistics) {
    static_cast<Attention&>(p) = problem;
    p.output = output.ask(random, p.batch, p.queries, p.value_dim);
    if (need_weights) p.weights = weights.ask(random, p.batch, p.queries, p.keys);
    if (need_statistics) {
      row_max = Stack<Acc>(random, p.batch, p.queries, 1, false);
      row_sum = Stack<Acc>(random, p.batch, p.queries, 1, false);
      p.row_max = row_max.output(), p.row_sum = row_sum.output();
    }
  }

  void run(Random& random, const cpu::KernelTable& table) {
    std::vector<Acc> partials(static_cast<size_t>(fused_partials(p)),
                              static_cast<Acc>(kNan));  // as allocated: anything
    p.partials = partials.empty() ? nullptr : partials.data();
    run_in_pieces(random, table.of(p.dtype).fused_forward, p);
    if (p.partials) run_in_pieces(random, table.of(p.dtype).fused_merge, p);
  }

  void check(const char* about) {
    FusedForward plain = p;
    plain.output = output.want.output();
    if (weights.wanted) plain.weights = weights.want.output();
    plain.row_max = plain.row_sum = {};
    for (int64_t e = 0, n = p.batch.count(); e < n; ++e) {
      naive::Rows<T> row(p, e);
      for (int64_t i = 0; i < p.queries; ++i) {
        naive::forward_row<T>(plain, e, i);
        row.compute(i);
        const RowBounds<T> bounds(row, i);
        for (int64_t j = 0; j < p.keys; ++j) {
          const double w = row.weight[j] * row.kept[j];
          const double error = (row.weight[j] * bounds.weight_error() + bounds.kUnderflow) * row.kept[j];
          if (weights.wanted) weights.bound_at(e, i, j) = error;
          if (w == 0) continue;
          for (int64_t d = 0; d < p.value_dim; ++d) output.bound_at(e, i, d) += error * std::fabs(row.value.at(j, d));
        }
      }
    }
    output.compare("output", about);
    weights.compare("weight", about);
  }
};

template <class T>
void test_forward(Random& random, const cpu::KernelTable& table) {
  const FusedCase<T> c(random, table.isa);
  const bool need_weights = random.chance(0.4), need_statistics = random.chance(0.5);
  ForwardResults<T> results(random, c.p, need_weights, need_statistics);
  results.run(random, table);
  const Stack<T> whole = results.output.got;
  results.run(random, table);
  CHECK(results.output.got.same_bytes(whole), "%s: the output depends on the tasks' order", c.about);
  results.check(c.about);
}

// The mean over the heads against the weights of all heads, which test_forward holds against the definition.
template <class T>
void test_average(Random& random, const cpu::KernelTable& table) {
  const FusedCase<T> c(random, table.isa);
  const int64_t heads = c.p.heads, last = c.p.batch.ndim - 1;
  if (heads == 0) return;  // the operator's business: no kernel is asked
  ForwardResults<T> all(random, c.p, true, true), average(random, c.p, false, true);
  all.run(random, table);
  BatchShape entries = c.p.batch;
  entries.size[last] = entries.size[last - 1] = 1;
  Stack<T> mean(random, entries, c.p.queries, c.p.keys, false);
  average.p.average = true, average.p.weights = mean.output();
  average.p.weights.batch_stride[last] = average.p.weights.batch_stride[last - 1] = 0;
  average.run(random, table);
  const double relative = 2 * epsilon<T>() + static_cast<double>(heads) * epsilon<accumulate_t<T>>();
  for (int64_t e = 0, n = entries.count(); e < n; ++e)
    for (int64_t i = 0; i < c.p.queries; ++i)
      for (int64_t j = 0; j < c.p.keys; ++j) {
        double want = 0;
        for (int64_t h = 0; h < heads; ++h) want += all.weights.got.value(e * heads + h, i, j) / double(heads);
        const double got = mean.value(e, i, j);
        CHECK(std::fabs(got - want) <= relative * want + kTiny<T>, "%s: the mean at %ld %ld %ld is %g, want %g",
              c.about, long(e), long(i), long(j), got, want);
      }
  average.p.weights = {};
  average.check(c.about);
}

template <class T>
struct BackwardResults {
  using Acc = accumulate_t<T>;
  FusedBackward p;
  Result<T> query, key, value, bias;
  Result<Acc> sink_rows;
  Stack<Acc> delta;
  bool weights_kept;  // else delta comes from tiles

  BackwardResults(Random& random, const FusedCase<T>& c, const ForwardResults<T>& forward, const Stack<T>& grad_output,
                  const Stack<T>* grad_weights)
      : weights_kept(!grad_weights || random.chance(0.5)) {
    static_cast<Attention&>(p) = c.p;
    p.output = forward.output.got.view, p.grad_output = grad_output.view;
    if (grad_weights) p.grad_weights = grad_weights->view;
    if (grad_weights && weights_kept) p.weights = forward.weights.got.view;
    p.row_max = forward.row_max.view, p.row_sum = forward.row_sum.view;
    delta = Stack<Acc>(random, p.batch, p.queries, 1, false);
    p.delta = delta.output();
    const auto shared = [&](Output view) {
      view.batch_stride[p.batch.ndim - 1] = 0;
      return view;
    };
    if (random.chance(0.8)) p.grad_query = query.ask(random, p.batch, p.queries, p.head_dim);
    if (random.chance(0.8)) p.grad_key = shared(key.ask(random, c.kv_batch, p.keys, p.head_dim));
    if (random.chance(0.8)) p.grad_value = shared(value.ask(random, c.kv_batch, p.keys, p.value_dim));
    if (p.bias && random.chance(0.8)) p.grad_bias = bias.ask(random, p.batch, p.queries, p.keys, true);
    if (p.sinks) p.grad_sink_rows = sink_rows.ask(random, p.batch, p.queries, 1);
  }

  void run(Random& random, const cpu::KernelTable& table) {
    const cpu::TypeKernels& kernels = table.of(p.dtype);
    run_in_pieces(random, weights_kept ? kernels.fused_delta : kernels.fused_delta_tiles, p);
    const BackwardPlan plan = backward_plan(p);
    if (query.wanted || key.wanted || value.wanted) {
      std::vector<Acc> workspace(static_cast<size_t>(plan.workspace()),
                                 static_cast<Acc>(kNan));  // as allocated: anything
      p.workspace = workspace.empty() ? nullptr : workspace.data();
      for (p.wave = 0; p.wave < plan.waves(); ++p.wave) run_in_pieces(random, kernels.fused_backward, p);
    }
    if (bias.wanted && !plan.has_bias) run_in_pieces(random, kernels.fused_bias_backward, p);
  }

  void check(const char* about) {
    FusedBackward plain = p;
    const auto redirect = [](Output& view, auto& result) {
      if (result.wanted) view.data = result.want.storage.data();
    };
    redirect(plain.grad_query, query), redirect(plain.grad_key, key), redirect(plain.grad_value, value);
    redirect(plain.grad_bias, bias), redirect(plain.grad_sink_rows, sink_rows);
    Stack<Acc> plain_delta = delta;
    plain.delta = plain_delta.output();
    for (int64_t e = 0, n = p.batch.count(); e < n; ++e) {
      for (int64_t i = 0; i < p.queries; ++i) naive::delta_row<T>(plain, e, i);
      if (e % p.group == 0) naive::backward_group<T>(plain, e / p.group);
      set_bounds(e);
    }
    if (bias.wanted) naive::bias_backward<T>(plain, static_cast<int64_t>(bias.want.storage.size()));
    query.compare("dQ", about), key.compare("dK", about), value.compare("dV", about);
    bias.compare("dbias", about), sink_rows.compare("dsink", about);
  }

  void set_bounds(int64_t e) {
    naive::Rows<T> row(p, e);
    const naive::In<T> output(p.batch, e, p.output), grad_output(p.batch, e, p.grad_output);
    const naive::In<T> weights(p.batch, e, p.weights), grad_weights(p.batch, e, p.grad_weights);
    const double softcap = p.softcap, eps = epsilon<Acc>();
    const int64_t kv = e / p.group;
    for (int64_t i = 0; i < p.queries; ++i) {
      row.compute(i);
      const RowBounds<T> bounds(row, i);
      double delta_size = 0;  // the sum of magnitudes in delta
      for (int64_t d = 0; d < p.value_dim; ++d) delta_size += std::fabs(output.at(i, d) * grad_output.at(i, d));
      for (int64_t j = 0; weights && j < p.keys; ++j) delta_size += std::fabs(weights.at(i, j) * grad_weights.at(i, j));
      for (int64_t j = 0; !weights_kept && j < p.keys; ++j) {
        const double w = row.weight[j] * row.kept[j];
        if (w != 0) delta_size += w * std::fabs(grad_weights.at(i, j));
        for (int64_t d = 0; w != 0 && d < p.value_dim; ++d)
          delta_size += w * std::fabs(grad_output.at(i, d) * row.value.at(j, d));
      }
      const double sum_error = eps * static_cast<double>(p.value_dim + p.keys + 16);
      if (sink_rows.wanted)
        sink_rows.bound_at(e, i, 0) =
            (row.sink_weight * (bounds.weight_error() + sum_error) + bounds.kUnderflow) * delta_size;
      for (int64_t j = 0; j < p.keys; ++j) {
        const double w = row.weight[j];
        if (w == 0) continue;
        const double w_error = w * (bounds.weight_error() + row_terms()) + bounds.kUnderflow;
        double size = delta_size;  // |dP| + |delta|, by summed magnitudes
        if (row.kept[j] != 0) {
          double dp = grad_weights ? std::fabs(grad_weights.at(i, j)) : 0;
          for (int64_t d = 0; d < p.value_dim; ++d) dp += std::fabs(grad_output.at(i, d) * row.value.at(j, d));
          size += dp * row.kept[j];
          for (int64_t d = 0; value.wanted && d < p.value_dim; ++d)
            value.bound_at(kv, j, d) += w_error * row.kept[j] * std::fabs(grad_output.at(i, d));
        }
        if (!row.visible(i, j)) continue;
        double error = (w_error + w * sum_error) * size;
        if (bias.wanted) bias.bound_at(e, i, j) += error;
        error = error * row.slope[j] + (softcap != 0 ? 2 / softcap * bounds.logit_error * w * size : 0);
        for (int64_t d = 0; d < p.head_dim; ++d) {
          const double scaled = std::fabs(p.scale) * error;
          if (query.wanted) query.bound_at(e, i, d) += scaled * std::fabs(row.key.at(j, d));
          if (key.wanted) key.bound_at(kv, j, d) += scaled * std::fabs(row.query.at(i, d));
        }
      }
    }
  }
  // Of sums over queries, group and batch.
  double row_terms() const { return epsilon<Acc>() * static_cast<double>(p.batch.count() * p.queries + 8); }
};

template <class T>
void test_backward(Random& random, const cpu::KernelTable& table) {
  const FusedCase<T> c(random, table.isa);
  const bool through_weights = random.chance(0.3);
  ForwardResults<T> forward(random, c.p, through_weights, true);
  forward.run(random, table);
  Stack<T> grad_output(random, c.p.batch, c.p.queries, c.p.value_dim, true);
  Stack<T> grad_weights(random, c.p.batch, c.p.queries, c.p.keys, true);
  grad_output.fill_normal(random, 1), grad_weights.fill_normal(random, 1);
  if (c.p.batch.count() * c.p.queries * c.p.keys == 0) return;  // the operator's business: no kernel is asked
  BackwardResults<T> results(random, c, forward, grad_output, through_weights ? &grad_weights : nullptr);
  results.run(random, table);
  const Stack<T> first[] = {results.query.got, results.key.got, results.value.got, results.bias.got};
  results.run(random, table);
  const Stack<T>* second[] = {&results.query.got, &results.key.got, &results.value.got, &results.bias.got};
  for (int n = 0; n < 4; ++n)
    CHECK(second[n]->same_bytes(first[n]), "%s: gradient %d depends on the tasks' order", c.about, n);
  results.check(c.about);
}

// Returns whether the type was wanted.
template <class T>
bool test_type(int rounds, const char* only) {
  if (only && std::strcmp(only, test::name_of(kDType<T>)) != 0) return false;
  test::on_each_level(kDType<T>, [&](const cpu::KernelTable& table) {
    Random random;
    for (int i = 0; i < rounds; ++i) {
      test_forward<T>(random, table);
      if (i % 3 == 0) test_average<T>(random, table);
      test_backward<T>(random, table);
    }
  });
  return true;
}

}  // namespace

// test_fused [ROUNDS [DTYPE]]: f64, f32, bf16 or f16; all without.
int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 60;
  const char* only = argc > 2 ? argv[2] : nullptr;
  int tested = test_type<double>(rounds, only) + test_type<float>(rounds, only);
  tested += test_type<bfloat16>(rounds, only) + test_type<float16>(rounds, only);
  CHECK(tested > 0, "there is no type %s", only);
  return test::summary("fused");
}
