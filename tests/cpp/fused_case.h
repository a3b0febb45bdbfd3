// One call of fused attention at random, with a place for its results and how far off each may be.
#pragma once
#include "../../csrc/core/attention.h"
#include "hidden.h"
#include "naive_attention.h"

// Dimensions of the batch without the group, which shares keys and values.
BatchShape without_group(BatchShape batch) {
  --batch.ndim;
  return batch;
}

// A result in a random layout, and what the plain loops make of it. `bound` is how far off each element may be.
template <class T>
struct Result {
  Stack<T> got, want;
  std::vector<double> bound;
  bool wanted = false;

  Output ask(Random& random, const BatchShape& batch, int64_t rows, int64_t cols, bool may_broadcast = false) {
    wanted = true;
    got = Stack<T>(random, batch, rows, cols, may_broadcast);
    got.fill_normal(random, 1);
    want = got;  // the gaps must stay as they are
    bound.assign(got.storage.size(), 0);
    return got.output();
  }
  // Each element of the stack once or, where it is broadcast, several times.
  template <class Visit>
  void each(const Visit& visit) {
    for (int64_t e = 0, n = got.batch.count(); e < n; ++e)
      for (int64_t i = 0; i < got.rows; ++i)
        for (int64_t j = 0; j < got.cols; ++j) visit(e, i, j);
  }
  double& bound_at(int64_t e, int64_t i, int64_t j) {
    return bound[static_cast<size_t>(&got.at(e, i, j) - got.storage.data())];
  }
  void compare(const char* what, const char* about) {
    if (!wanted) return;
    each([&](int64_t e, int64_t i, int64_t j) {
      const double g = got.value(e, i, j), w = want.value(e, i, j);
      const double allowed = bound_at(e, i, j) + epsilon<T>() * std::fabs(w) + kTiny<T>;
      CHECK(std::fabs(g - w) <= allowed || (std::isnan(g) && std::isnan(w)),
            "%s: %s [%ld, %ld, %ld] is %.9g, not %.9g; allowed %.3g", about, what, long(e), long(i), long(j), g, w,
            allowed);
    });
    each([&](int64_t e, int64_t i, int64_t j) { got.at(e, i, j) = want.at(e, i, j); });
    CHECK(got.same_bytes(want), "%s: %s: something was written between the elements", about, what);
  }
};

template <class T>
struct FusedCase {
  using Acc = accumulate_t<T>;
  Attention p;
  BatchShape kv_batch;
  Stack<T> query, key, value, bias, sinks;
  Hidden hidden;
  const int64_t seed;
  char about[300];

  FusedCase(Random& random, const char* isa) : seed(static_cast<int64_t>(random.bits())) {
    p.dtype = kDType<T>;
    p.batch.ndim = static_cast<int>(random.integer(2, 4));
    for (int d = 0; d < p.batch.ndim; ++d) p.batch.size[d] = random.chance(0.03) ? 0 : random.integer(1, 2);
    p.group = p.batch.size[p.batch.ndim - 1] = random.integer(1, 3);
    p.heads = p.group * p.batch.size[p.batch.ndim - 2];
    kv_batch = without_group(p.batch);
    p.queries = random_size(random), p.keys = random_size(random);
    p.head_dim = head_size(random), p.value_dim = random.chance(0.6) ? p.head_dim : head_size(random);
    if (random.chance(0.1)) {  // few queries, keys enough to be cut into parts
      p.queries = random.integer(1, 10), p.keys = random.integer(1000, 2500), p.head_dim = p.value_dim = 128;
      for (int d = 0; d < p.batch.ndim - 1; ++d) p.batch.size[d] = 1;
      p.heads = p.group, kv_batch = without_group(p.batch);
    }
    // Long ones by themselves only: the plain loops are slow.
    while (p.work() > 2e7) (p.queries > p.keys ? p.queries : p.keys) /= 3;

    query = Stack<T>(random, p.batch, p.queries, p.head_dim, true);
    key = Stack<T>(random, kv_batch, p.keys, p.head_dim, true);
    value = Stack<T>(random, kv_batch, p.keys, p.value_dim, true);
    query.fill_normal(random, random.chance(0.2) ? 10 : 1), key.fill_normal(random, 1), value.fill_normal(random, 1);
    p.query = query.view, p.key = shared(key), p.value = shared(value);
    p.scale = random.pick({0.3, 0.3, 1.0, -0.5, 0.0});
    if (random.chance(0.4)) {
      bias = Stack<T>(random, p.batch, p.queries, p.keys, true);
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
    }
    if (random.chance(0.3)) p.softcap = 5;
    p.mask_value = random.pick({-kInf, -kInf, -kInf, -1e9, -1e39, 0.5});
    if (random.chance(0.3)) p.dropout = random.pick({0.1, 0.5, 1.0}), p.seed = &seed;
    if (random.chance(0.7)) hidden.randomise(random, p.batch, p.queries, p.keys);
    p.visibility = hidden.visibility;
    poison(random);
    std::snprintf(about, sizeof about,
                  "%s %s, batch %ld group %ld, %ld x %ld, D %ld, Dv %ld%s%s%s%s%s, window %ld %ld, mask_value %g, p %g",
                  isa, test::name_of(p.dtype), long(p.batch.count()), long(p.group), long(p.queries), long(p.keys),
                  long(p.head_dim), long(p.value_dim), p.bias ? ", bias" : "", p.sinks ? ", sinks" : "",
                  p.visibility.mask ? ", mask" : "", p.visibility.key_lengths ? ", lengths" : "",
                  p.softcap != 0 ? ", softcap" : "", long(p.visibility.window_left), long(p.visibility.window_right),
                  p.mask_value, p.dropout);
  }

  static int64_t head_size(Random& random) {
    return random.pick<int64_t>({0, 1, 2, 3, 7, 8, 15, 16, 17, 32, 33, 64, 65, 80, 128});
  }

  Input shared(const Stack<T>& stack) const {
    Input view = stack.view;
    view.batch_stride[p.batch.ndim - 1] = 0;
    return view;
  }

  // Keys and values that no query sees may hold anything.
  void poison(Random& random) {
    if (p.mask_value != -kInf || !random.chance(0.4)) return;
    const auto spoil = [&](Stack<T>& stack) {
      std::vector<bool> seen(stack.storage.size());
      const auto rows = [&](const auto& visit) {
        for (int64_t e = 0, n = p.batch.count(); e < n; ++e)
          for (int64_t j = 0; j < p.keys; ++j) {
            bool visible = false;
            for (int64_t i = 0; i < p.queries; ++i) visible = visible || hidden.visible(p.batch, e, i, j);
            for (int64_t d = 0; d < stack.cols; ++d)
              visit(static_cast<size_t>(&stack.at(e / p.group, j, d) - stack.storage.data()), visible);
          }
      };
      rows([&](size_t at, bool visible) { seen[at] = seen[at] || visible; });
      rows([&](size_t at, bool) {
        if (!seen[at]) stack.storage[at] = narrow<T>(static_cast<Acc>(at % 2 ? kNan : kInf));
      });
    };
    spoil(key), spoil(value);
  }
};

// How far the results of one query row may be off. A logit of size m, a sum of head_dim products, is off by some
// (head_dim + 8) eps m, e^x by as much relatively; P and dS may be rounded to T before they are multiplied; sums of n
// terms are off by n eps of the summed magnitudes.
template <class T>
struct RowBounds {
  using Acc = accumulate_t<T>;
  static constexpr double kRoundings = 2;  // of P or dS to T: half a unit each, and again where parts are merged
  const Attention& p;
  naive::Rows<T>& row;
  const double eps = epsilon<Acc>();
  double logit_error = 0;

  RowBounds(naive::Rows<T>& r, int64_t i) : p(r.p), row(r) {
    double largest = row.sinks ? std::fabs(row.sinks.at(0)) : 0;
    for (int64_t j = 0; j < p.keys; ++j) {
      if (!row.visible(i, j)) continue;
      double size = 0;
      for (int64_t d = 0; d < p.head_dim; ++d) size += std::fabs(row.query.at(i, d) * row.key.at(j, d));
      size *= std::fabs(p.scale);
      if (row.bias && std::isfinite(row.bias.at(i, j))) size += std::fabs(row.bias.at(i, j));
      largest = std::max(largest, size);
    }
    if (std::isfinite(p.mask_value)) largest = std::max(largest, std::min(1e3, std::fabs(p.mask_value)));
    logit_error = eps * (static_cast<double>(p.head_dim) + 8) * largest;
  }
  // Relative error of a weight, and how far off one may be in any case: below the normal numbers exp gives 0.
  double weight_error() const {
    return 4 * logit_error + eps * static_cast<double>(p.keys + 16) + kRoundings * epsilon<T>();
  }
  static constexpr double kUnderflow = kTiny<Acc>;
};
