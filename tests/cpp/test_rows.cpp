// Softmax, its backward and dropout through the kernel tables: every level of this machine, every element type, random
// sizes, strides, masks and windows, against plain loops in double.
#include "../../csrc/core/masking.h"
#include "../../csrc/core/philox.h"
#include "hidden.h"
#include "levels.h"

namespace {

template <class T>
struct ForwardCase {
  using Acc = accumulate_t<T>;
  SoftmaxForward p;
  Stack<T> scores, bias, sinks, weights;
  Stack<Acc> sink_weights;
  Hidden hidden;

  explicit ForwardCase(Random& random) {
    p.dtype = kDType<T>;
    p.batch = random_batch(random);
    p.rows = random.integer(0, 5), p.cols = random_size(random);
    if (random.chance(0.05)) p.rows = 70;
    scores = Stack<T>(random, p.batch, p.rows, p.cols, true);
    scores.fill_normal(random, random.chance(0.2) ? 300 : 3);
    p.scores = scores.view;
    if (random.chance(0.5)) {
      bias = Stack<T>(random, p.batch, p.rows, p.cols, true);
      bias.fill_normal(random, 2);
      if (random.chance(0.3))  // a bias used as a mask
        for (T& b : bias.storage)
          if (random.chance(0.4)) b = narrow<T>(static_cast<Acc>(-kInf));
      p.bias = bias.view;
    }
    if (random.chance(0.3)) {
      sinks = Stack<T>(random, p.batch, 1, 1, true);
      sinks.fill_normal(random, 3);
      p.sinks = sinks.view;
      sink_weights = Stack<Acc>(random, p.batch, p.rows, 1, false);
      p.sink_weights = sink_weights.output();
    }
    if (random.chance(0.3)) p.softcap = 5;
    const double values[] = {-kInf, -kInf, -1e9, -1e39, 0.5};
    p.mask_value = values[random.integer(0, 4)];
    hidden.randomise(random, p.batch, p.rows, p.cols);
    p.visibility = hidden.visibility;
    weights = Stack<T>(random, p.batch, p.rows, p.cols, false);
    p.weights = weights.output();
    hide_poison(random);
  }

  // Hidden scores and biases may hold anything, as long as nothing visible shares the element by broadcasting.
  void hide_poison(Random& random) {
    if (!random.chance(0.5)) return;
    std::vector<bool> seen_scores(scores.storage.size()), seen_bias(bias.storage.size());
    const auto each = [&](auto&& f) {
      for (int64_t e = 0, n = p.batch.count(); e < n; ++e)
        for (int64_t i = 0; i < p.rows; ++i)
          for (int64_t j = 0; j < p.cols; ++j) f(e, i, j);
    };
    each([&](int64_t e, int64_t i, int64_t j) {
      if (!hidden.visible(p.batch, e, i, j)) return;
      seen_scores[static_cast<size_t>(&scores.at(e, i, j) - scores.storage.data())] = true;
      if (p.bias) seen_bias[static_cast<size_t>(&bias.at(e, i, j) - bias.storage.data())] = true;
    });
    const double poison[] = {kNan, kInf, -kInf, 1e30};
    each([&](int64_t e, int64_t i, int64_t j) {
      if (!seen_scores[static_cast<size_t>(&scores.at(e, i, j) - scores.storage.data())])
        scores.set(e, i, j, poison[(i + j) % 4]);
      if (p.bias && !seen_bias[static_cast<size_t>(&bias.at(e, i, j) - bias.storage.data())])
        bias.set(e, i, j, poison[j % 4]);
    });
  }

  struct Row {
    std::vector<double> weights;
    double sink, largest;
  };

  Row reference(int64_t e, int64_t i) {
    std::vector<long double> x(static_cast<size_t>(p.cols));
    double largest = 0;  // of the visible logits' parts: what their rounding errors scale with
    for (int64_t j = 0; j < p.cols; ++j) {
      long double& xj = x[static_cast<size_t>(j)];
      if (hidden.visible(p.batch, e, i, j)) {
        xj = scores.value(e, i, j);
        if (p.softcap != 0) xj = p.softcap * std::tanh(xj / p.softcap);
        double size = static_cast<double>(std::fabs(xj));
        if (p.bias) {
          const double b = bias.value(e, i, j);
          xj += b;
          if (std::isfinite(b)) size = std::max(size, std::fabs(b));
        }
        largest = std::max(largest, size);
      } else {
        xj = p.mask_value;
      }
    }
    const double sink = p.sinks ? sinks.value(e, 0, 0) : -kInf;
    long double max = sink, sum = 0;
    for (long double v : x) max = std::max(max, v);
    if (max == -kInf) return {std::vector<double>(x.size(), 0.0), 0, 0};
    for (long double& v : x) sum += v = std::exp(v - max);
    sum += std::exp(sink - max);
    for (long double& v : x) v /= sum;
    return {{x.begin(), x.end()},
            static_cast<double>(std::exp(sink - max) / sum),
            std::max(largest, p.sinks ? std::fabs(sink) : 0)};
  }
};

// Rounding analysis: a logit of size m is off by a few m eps, e^x by as much relatively, the sum and the scaling add a
// few eps, and the result is rounded to T once.
template <class T>
double weight_tolerance(double weight, double largest) {
  return std::fabs(weight) * (epsilon<accumulate_t<T>>() * (8 + 4 * largest) + 0.505 * epsilon<T>()) + kTiny<T>;
}

template <class T>
void test_forward(Random& random, const cpu::KernelTable& table) {
  ForwardCase<T> c(random);
  const auto& kernel = table.of(kDType<T>).softmax_forward;
  kernel.run(c.p, 0, kernel.tasks(c.p));
  const Stack<T> whole = c.weights;
  run_in_pieces(random, kernel, c.p);
  CHECK(c.weights.same_bytes(whole), "%s: weights depend on the tasks' order", table.isa);
  for (int64_t e = 0, n = c.p.batch.count(); e < n; ++e)
    for (int64_t i = 0; i < c.p.rows; ++i) {
      const auto row = c.reference(e, i);
      for (int64_t j = 0; j < c.p.cols; ++j) {
        const double expected = row.weights[static_cast<size_t>(j)], got = c.weights.value(e, i, j);
        CHECK(std::fabs(got - expected) <= weight_tolerance<T>(expected, row.largest),
              "%s type %d: weight [%ld, %ld, %ld] of %ld keys is %.17g, not %.17g", table.isa, int(kDType<T>), long(e),
              long(i), long(j), long(c.p.cols), got, expected);
      }
      if (!c.p.sink_weights) continue;
      const double got = c.sink_weights.value(e, i, 0);
      CHECK(std::fabs(got - row.sink) <= weight_tolerance<decltype(accumulate_t<T>())>(row.sink, row.largest),
            "%s: sink weight is %g, not %g", table.isa, got, row.sink);
    }
}

template <class T>
void test_backward(Random& random, const cpu::KernelTable& table) {
  using Acc = accumulate_t<T>;
  SoftmaxBackward p;
  p.dtype = kDType<T>;
  p.batch = random_batch(random);
  p.rows = random.integer(0, 5), p.cols = random_size(random);
  Stack<T> weights(random, p.batch, p.rows, p.cols, true), grad(random, p.batch, p.rows, p.cols, false);
  Stack<T> scores(random, p.batch, p.rows, p.cols, false);
  Stack<Acc> sink(random, p.batch, p.rows, 1, true), grad_sink(random, p.batch, p.rows, 1, true);
  for (T& w : weights.storage)
    w = narrow<T>(random.chance(0.3) ? Acc(0) : static_cast<Acc>(std::fabs(random.normal()) / double(p.cols + 1)));
  grad.fill_normal(random, 1), scores.fill_normal(random, 4);
  sink.fill_normal(random, 0.3), grad_sink.fill_normal(random, 1);
  p.weights = weights.view, p.grad_weights = grad.view;
  const bool has_sink = random.chance(0.4), has_grad_sink = has_sink && random.chance(0.7);
  if (has_sink) p.sink_weights = sink.view;
  if (has_grad_sink) p.grad_sink_weights = grad_sink.view;
  if (random.chance(0.4)) p.scores = scores.view, p.softcap = 5;
  Hidden hidden;
  hidden.randomise(random, p.batch, p.rows, p.cols);
  p.visibility = hidden.visibility;
  p.apply_visibility = random.chance(0.5);
  // Where there is no weight, the gradient and the score may be NaN.
  for (int64_t e = 0, n = p.batch.count(); e < n; ++e)
    for (int64_t i = 0; i < p.rows; ++i)
      for (int64_t j = 0; j < p.cols; ++j)
        if (weights.value(e, i, j) == 0 && random.chance(0.5)) grad.set(e, i, j, kNan), scores.set(e, i, j, kNan);
  Stack<T> grad_scores(random, p.batch, p.rows, p.cols, false), grad_logits(random, p.batch, p.rows, p.cols, false);
  Stack<Acc> grad_rows(random, p.batch, p.rows, 1, false);
  p.grad_scores = grad_scores.output();
  if (p.scores && random.chance(0.5)) p.grad_logits = grad_logits.output();
  if (has_sink) p.grad_sink_rows = grad_rows.output();

  const auto& kernel = table.of(kDType<T>).softmax_backward;
  kernel.run(p, 0, kernel.tasks(p));
  const Stack<T> whole = grad_scores;
  run_in_pieces(random, kernel, p);
  CHECK(grad_scores.same_bytes(whole), "%s: gradients depend on the tasks' order", table.isa);

  for (int64_t e = 0, n = p.batch.count(); e < n; ++e)
    for (int64_t i = 0; i < p.rows; ++i) {
      double size = 0;
      long double exact_delta = 0;
      const auto add = [&](double w, double g) {
        if (w != 0) exact_delta += static_cast<long double>(w) * g, size += std::fabs(w * g);
      };
      for (int64_t j = 0; j < p.cols; ++j) add(weights.value(e, i, j), grad.value(e, i, j));
      const double ps = has_sink ? sink.value(e, i, 0) : 0, gs = has_grad_sink ? grad_sink.value(e, i, 0) : 0;
      add(ps, gs);
      const double delta = static_cast<double>(exact_delta);
      // delta is off by at most (terms added in a row) eps of the sum of magnitudes; each term has a few roundings.
      const double eps = epsilon<Acc>() * 40;
      for (int64_t j = 0; j < p.cols; ++j) {
        const double w = weights.value(e, i, j);
        const bool none = w == 0 || (p.apply_visibility && !hidden.visible(p.batch, e, i, j));
        const double g = none ? 0 : grad.value(e, i, j), dx = none ? 0 : w * (g - delta);
        const double error = std::fabs(w) * eps * (std::fabs(g) + size) + kTiny<T>;
        double slope = 1;
        if (p.scores && dx != 0) {
          const double c = std::cosh(scores.value(e, i, j) / p.softcap);
          slope = 1 / (c * c);
        }
        const double got = grad_scores.value(e, i, j);
        CHECK(std::fabs(got - dx * slope) <= error + 0.505 * epsilon<T>() * std::fabs(dx * slope),
              "%s type %d: gradient [%ld, %ld, %ld] of %ld keys is %.17g, not %.17g", table.isa, int(kDType<T>),
              long(e), long(i), long(j), long(p.cols), got, dx * slope);
        if (p.grad_logits)
          CHECK(std::fabs(grad_logits.value(e, i, j) - dx) <= error + 0.505 * epsilon<T>() * std::fabs(dx),
                "%s: logit gradient is %g, not %g", table.isa, grad_logits.value(e, i, j), dx);
      }
      if (has_sink)
        CHECK(std::fabs(grad_rows.value(e, i, 0) - ps * (gs - delta)) <=
                  eps * std::fabs(ps) * (std::fabs(gs) + size) + 1e-30,
              "%s: sink gradient is %g, not %g", table.isa, grad_rows.value(e, i, 0), ps * (gs - delta));
    }
}

template <class T>
void test_dropout(Random& random, const cpu::KernelTable& table) {
  using Acc = accumulate_t<T>;
  Dropout p;
  p.dtype = kDType<T>;
  p.batch = random_batch(random);
  p.rows = random.integer(0, 6), p.cols = random_size(random);
  Stack<T> weights(random, p.batch, p.rows, p.cols, true), out(random, p.batch, p.rows, p.cols, false);
  weights.fill_normal(random, 1);
  if (random.chance(0.3) && !weights.storage.empty()) weights.storage[0] = narrow<T>(static_cast<Acc>(kNan));
  p.weights = weights.view, p.out = out.output();
  const int64_t seed = static_cast<int64_t>(random.bits());
  p.seed = &seed;
  const double rates[] = {0, 0.1, 0.5, 0.999999, 1};
  p.p = rates[random.integer(0, 4)];
  run_in_pieces(random, table.of(kDType<T>).dropout, p);
  const int64_t heads = p.batch.size[p.batch.ndim - 1];
  for (int64_t e = 0, n = p.batch.count(); e < n; ++e)
    for (int64_t i = 0; i < p.rows; ++i)
      for (int64_t j = 0; j < p.cols; ++j) {
        const PhiloxBlock block = dropout_block(dropout_seed(p.seed), uint32_t(e / heads), uint32_t(e % heads),
                                                uint32_t(i), uint32_t(j / kKeysPerBlock));
        const bool keep = dropout_field(block, int(j % kKeysPerBlock)) >= dropout_threshold(p.p);
        const T expected = narrow<T>(keep ? widen(weights.at(e, i, j)) * static_cast<Acc>(1 / (1 - p.p)) : Acc(0));
        const Acc a = widen(expected), b = widen(out.at(e, i, j));
        CHECK(a == b || (a != a && b != b), "%s type %d p %g: [%ld, %ld, %ld] is %.17g, not %.17g", table.isa,
              int(kDType<T>), p.p, long(e), long(i), long(j), double(b), double(a));
      }
}

// One row, contiguous; returns the weights.
template <class T>
std::vector<double> softmax_row(const cpu::KernelTable& table, const std::vector<double>& x, double mask_value = -kInf,
                                int64_t length = -1, double sink = kNan, double* sink_weight = nullptr) {
  using Acc = accumulate_t<T>;
  std::vector<T> scores, weights(x.size() + 1);
  for (double v : x) scores.push_back(narrow<T>(static_cast<Acc>(v)));
  SoftmaxForward p;
  p.dtype = kDType<T>;
  p.batch.ndim = 1, p.batch.size[0] = 1;
  p.rows = 1, p.cols = static_cast<int64_t>(x.size());
  p.scores.data = scores.data(), p.scores.col_stride = 1;
  p.weights.data = weights.data(), p.weights.col_stride = 1;
  p.mask_value = mask_value;
  const T sink_logit = narrow<T>(static_cast<Acc>(sink));
  Acc sink_result = 0;
  if (sink_weight) p.sinks.data = &sink_logit, p.sink_weights.data = &sink_result;
  if (length >= 0) p.visibility.key_lengths.data = &length;
  table.of(kDType<T>).softmax_forward.run(p, 0, 1);
  if (sink_weight) *sink_weight = sink_result;
  std::vector<double> result;
  for (size_t j = 0; j < x.size(); ++j) result.push_back(widen(weights[j]));
  return result;
}

template <class T>
void test_special_rows(const cpu::KernelTable& table) {
  const auto all = [](const std::vector<double>& w, auto&& f) { return std::all_of(w.begin(), w.end(), f); };
  const auto is_nan = [](double v) { return std::isnan(v); };
  const auto is_zero = [](double v) { return v == 0 && !std::signbit(v); };
  for (size_t n : {1, 5, 16, 40}) {
    std::vector<double> x(n, -kInf);
    CHECK(all(softmax_row<T>(table, x), is_zero), "%s: all -inf", table.isa);
    double sink = 0;
    CHECK(all(softmax_row<T>(table, x, -kInf, -1, 2.0, &sink), is_zero) && sink == 1, "%s: sink alone", table.isa);
    for (size_t at = 0; at < n; at += 3) {  // NaN shows, wherever it stands; what is -inf still has no weight
      x[at] = kNan;
      const std::vector<double> w = softmax_row<T>(table, x);
      CHECK(is_nan(w[at]) && std::count_if(w.begin(), w.end(), is_zero) == static_cast<std::ptrdiff_t>(n - 1),
            "%s: NaN among -inf", table.isa);
      x[at] = -kInf;
    }
    std::fill(x.begin(), x.end(), 1.0);
    CHECK(all(softmax_row<T>(table, x, -kInf, 0), is_zero), "%s: nothing visible", table.isa);
    const double uniform = softmax_row<T>(table, std::vector<double>(n, 7.0))[0];
    CHECK(all(softmax_row<T>(table, x, -1e9, 0), [&](double v) { return v == uniform; }), "%s: uniform", table.isa);
    x[n - 1] = kInf;
    const std::vector<double> infinite = softmax_row<T>(table, x);
    CHECK(is_nan(infinite[n - 1]) &&
              std::count_if(infinite.begin(), infinite.end(), is_zero) + 1 == static_cast<std::ptrdiff_t>(n),
          "%s: +inf", table.isa);
    x[n - 1] = kNan;
    CHECK(all(softmax_row<T>(table, x), is_nan), "%s: NaN", table.isa);
    // Hidden by length, NaN does not matter.
    const std::vector<double> w = softmax_row<T>(table, x, -kInf, static_cast<int64_t>(n - 1));
    CHECK(is_zero(w[n - 1]) && (n == 1 || std::fabs(w[0] * double(n - 1) - 1) < 1.5 * epsilon<T>()), "%s: length",
          table.isa);
  }
  const double large[] = {6e4, 1e8, 1e38};
  for (double scale : large) {
    if (scale > 6e4 && std::is_same_v<T, float16>) break;
    const std::vector<double> w = softmax_row<T>(table, {scale, -scale, scale, 0});
    CHECK(w[0] == 0.5 && w[1] == 0 && w[2] == 0.5 && w[3] == 0, "%s: logits of size %g", table.isa, scale);
  }
}

void test_philox() {
  const PhiloxBlock counters[] = {{{0, 0, 0, 0}},
                                  {{0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF}},
                                  {{0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344}}};
  const uint32_t keys[][2] = {{0, 0}, {0xFFFFFFFF, 0xFFFFFFFF}, {0xA4093822, 0x299F31D0}};
  // Known answers of the Random123 distribution.
  const PhiloxBlock answers[] = {{{0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8}},
                                 {{0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD}},
                                 {{0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1}}};
  for (int i = 0; i < 3; ++i) {
    const PhiloxBlock got = philox4x32(counters[i], keys[i][0], keys[i][1]);
    CHECK(std::memcmp(&got, &answers[i], sizeof got) == 0, "Philox vector %d", i);
  }
}

template <class T>
void test_level(const cpu::KernelTable& table, int rounds) {
  Random random;
  for (int i = 0; i < rounds; ++i) {
    test_forward<T>(random, table);
    test_backward<T>(random, table);
    test_dropout<T>(random, table);
  }
  test_special_rows<T>(table);
}

template <class T>
void test_type(int rounds) {
  test::on_each_level(kDType<T>, [&](const cpu::KernelTable& table) { test_level<T>(table, rounds); });
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 400;
  test_philox();
  test_type<double>(rounds);
  test_type<float>(rounds);
  test_type<bfloat16>(rounds);
  test_type<float16>(rounds);
  return test::summary("rows");
}
