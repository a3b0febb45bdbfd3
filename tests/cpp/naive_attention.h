// Attention and its backward as plain loops in double over the structs of core/attention.h: what the kernels are
// compared with. Of the product it uses the structs and the two rules that must not exist twice, masking.h and
// philox.h.
#pragma once
#include <cmath>
#include <cstdint>

#include "../../csrc/core/attention.h"
#include "../../csrc/core/finite.h"
#include "../../csrc/core/half.h"
#include "../../csrc/core/masking.h"
#include "../../csrc/core/philox.h"

namespace naive {

using namespace mha;

struct Numbers {
  double* data;
  explicit Numbers(int64_t n) : data(new double[static_cast<size_t>(n > 0 ? n : 1)]()) {}
  Numbers(const Numbers&) = delete;
  Numbers& operator=(const Numbers&) = delete;
  ~Numbers() { delete[] data; }
  double& operator[](int64_t i) const { return data[i]; }
};

// The matrix of one batch entry.
template <class T>
struct In {
  const T* p;
  int64_t row, col;
  In(const BatchShape& batch, int64_t entry, const Input& view)
      : p(view ? matrix<const T>(batch, entry, view) : nullptr), row(view.row_stride), col(view.col_stride) {}
  explicit operator bool() const { return p != nullptr; }
  double at(int64_t i, int64_t j = 0) const { return static_cast<double>(widen(p[i * row + j * col])); }
};

template <class T>
struct Out {
  T* p;
  int64_t row, col;
  Out(const BatchShape& batch, int64_t entry, const Output& view)
      : p(view ? matrix<T>(batch, entry, view) : nullptr), row(view.row_stride), col(view.col_stride) {}
  explicit operator bool() const { return p != nullptr; }
  void set(int64_t i, int64_t j, double x) { p[i * row + j * col] = narrow<T>(static_cast<accumulate_t<T>>(x)); }
};

// The rows of one query head, worked out one at a time.
template <class T>
struct Rows {
  using Acc = accumulate_t<T>;
  const Attention& p;
  const int64_t entry;
  const In<T> query, key, value, bias, sinks;
  const BatchVisibility visibility;
  Numbers logit, slope, weight, kept;  // kept: what dropout multiplies a weight with
  double max = 0, sum = 0, sink_weight = 0;

  Rows(const Attention& problem, int64_t e)
      : p(problem),
        entry(e),
        query(p.batch, e, p.query),
        key(p.batch, e, p.key),
        value(p.batch, e, p.value),
        bias(p.batch, e, p.bias),
        sinks(p.batch, e, p.sinks),
        visibility(visibility_of(p.visibility, p.batch, e, p.keys)),
        logit(p.keys),
        slope(p.keys),
        weight(p.keys),
        kept(p.keys) {}

  bool visible(int64_t i, int64_t j) const {
    const KeyRange range = visible_keys(visibility, i);
    if (j < range.begin || j >= range.end) return false;
    return !visibility.mask || visibility.mask[i * visibility.mask_row_stride + j * visibility.mask_col_stride];
  }

  void compute(int64_t i) {
    const double softcap = softcap_in<Acc>(p.softcap), infinity = HUGE_VAL;
    max = sinks ? sinks.at(0) : -infinity;
    for (int64_t j = 0; j < p.keys; ++j) {
      slope[j] = 0;  // the logit of a hidden key is a constant
      logit[j] = to_finite<Acc>(p.mask_value);
      if (visible(i, j)) {
        double s = 0;
        for (int64_t d = 0; d < p.head_dim; ++d) s += query.at(i, d) * key.at(j, d);
        s *= p.scale;
        const double e = softcap != 0 ? std::exp(-2 * std::fabs(s / softcap)) : 1;
        slope[j] = 4 * e / ((1 + e) * (1 + e));  // 1 - tanh^2
        logit[j] = softcap != 0 ? softcap * std::tanh(s / softcap) : s;
        if (bias) logit[j] += bias.at(i, j);
      }
      if (logit[j] > max) max = logit[j];
    }
    sum = sinks && sinks.at(0) > -infinity ? std::exp(sinks.at(0) - max) : 0;
    sink_weight = sum;
    for (int64_t j = 0; j < p.keys; ++j) {
      weight[j] = logit[j] == -infinity ? 0 : std::exp(logit[j] - (max == -infinity ? 0 : max));  // NaN shows
      sum += weight[j];
      kept[j] = keep_factor(i, j);
    }
    if (!(sum == 0)) sink_weight /= sum;
    for (int64_t j = 0; j < p.keys; ++j)
      if (weight[j] != 0) weight[j] /= sum;
  }

  double keep_factor(int64_t i, int64_t j) const {
    if (p.dropout == 0) return 1;
    const PhiloxBlock block = dropout_block(dropout_seed(p.seed), static_cast<uint32_t>(entry / p.heads),
                                            static_cast<uint32_t>(entry % p.heads), static_cast<uint32_t>(i),
                                            static_cast<uint32_t>(j / kKeysPerBlock));
    const bool keep = dropout_field(block, static_cast<int>(j % kKeysPerBlock)) >= dropout_threshold(p.dropout);
    return keep ? 1 / (1 - p.dropout) : 0;
  }
};

template <class T>
void forward_row(const FusedForward& p, int64_t entry, int64_t i) {
  using Acc = accumulate_t<T>;
  Rows<T> row(p, entry);
  row.compute(i);
  Out<T> output(p.batch, entry, p.output), weights(p.batch, entry, p.weights);
  for (int64_t d = 0; d < p.value_dim; ++d) {
    double sum = 0;
    for (int64_t j = 0; j < p.keys; ++j) {
      const double w = row.weight[j] * row.kept[j];
      if (row.kept[j] != 0 && w != 0) sum += w * row.value.at(j, d);
    }
    output.set(i, d, sum);
  }
  if (weights)
    for (int64_t j = 0; j < p.keys; ++j) weights.set(i, j, row.kept[j] == 0 ? 0 : row.weight[j] * row.kept[j]);
  if (p.row_max) Out<Acc>(p.batch, entry, p.row_max).set(i, 0, row.max);
  if (p.row_sum) Out<Acc>(p.batch, entry, p.row_sum).set(i, 0, row.sum);
}

// dP of one logit, through dropout.
template <class T>
double grad_probability(const FusedBackward& p, const Rows<T>& row, int64_t i, int64_t j) {
  if (row.kept[j] == 0) return 0;
  const In<T> grad_output(p.batch, row.entry, p.grad_output), grad_weights(p.batch, row.entry, p.grad_weights);
  double dp = grad_weights ? grad_weights.at(i, j) : 0;
  for (int64_t d = 0; d < p.value_dim; ++d) dp += grad_output.at(i, d) * row.value.at(j, d);
  return dp * row.kept[j];
}

// delta of row i, which `row` has computed: dO . O + sum_j W dW from the rounded results or, where the weights are
// missing, sum_j P dP. What is exactly 0 contributes nothing.
template <class T>
double delta(const FusedBackward& p, const Rows<T>& row, int64_t i) {
  const In<T> output(p.batch, row.entry, p.output), grad_output(p.batch, row.entry, p.grad_output);
  const In<T> weights(p.batch, row.entry, p.weights), grad_weights(p.batch, row.entry, p.grad_weights);
  double sum = 0;
  if (grad_weights && !weights) {
    for (int64_t j = 0; j < p.keys; ++j)
      if (row.weight[j] != 0) sum += row.weight[j] * grad_probability<T>(p, row, i, j);
    return sum;
  }
  for (int64_t d = 0; d < p.value_dim; ++d)
    if (output.at(i, d) != 0) sum += output.at(i, d) * grad_output.at(i, d);
  if (grad_weights)
    for (int64_t j = 0; j < p.keys; ++j)
      if (weights.at(i, j) != 0) sum += weights.at(i, j) * grad_weights.at(i, j);
  return sum;
}

// Calls visit(i, j, row, dx) for every logit of an entry that has a gradient or a weight.
template <class T, class Visit>
void each_logit(const FusedBackward& p, int64_t entry, const Visit& visit) {
  Rows<T> row(p, entry);
  for (int64_t i = 0; i < p.queries; ++i) {
    row.compute(i);
    const double own_delta = delta<T>(p, row, i);
    for (int64_t j = 0; j < p.keys; ++j) {
      if (row.weight[j] == 0) continue;
      const double dp = grad_probability<T>(p, row, i, j);
      visit(i, j, row, row.slope[j] == 0 && !row.visible(i, j) ? 0 : row.weight[j] * (dp - own_delta));
    }
  }
}

// dQ, dK and dV of all query heads that share the key/value head of entries group * g ...
template <class T>
void backward_group(const FusedBackward& p, int64_t g) {
  Numbers dk(p.keys * p.head_dim), dv(p.keys * p.value_dim);
  const int64_t first = g * p.group;
  for (int64_t entry = first; entry < first + p.group; ++entry) {
    Numbers dq(p.queries * p.head_dim);
    const In<T> grad_output(p.batch, entry, p.grad_output);
    each_logit<T>(p, entry, [&](int64_t i, int64_t j, Rows<T>& row, double dx) {
      const double w = row.weight[j] * row.kept[j], ds = dx == 0 ? 0 : p.scale * dx * row.slope[j];
      if (row.kept[j] != 0 && w != 0)
        for (int64_t d = 0; d < p.value_dim; ++d) dv[j * p.value_dim + d] += w * grad_output.at(i, d);
      if (ds == 0) return;
      for (int64_t d = 0; d < p.head_dim; ++d) {
        dq[i * p.head_dim + d] += ds * row.key.at(j, d);
        dk[j * p.head_dim + d] += ds * row.query.at(i, d);
      }
    });
    if (Out<T> out{p.batch, entry, p.grad_query})
      for (int64_t i = 0; i < p.queries; ++i)
        for (int64_t d = 0; d < p.head_dim; ++d) out.set(i, d, dq[i * p.head_dim + d]);
  }
  Out<T> grad_key(p.batch, first, p.grad_key), grad_value(p.batch, first, p.grad_value);
  for (int64_t j = 0; j < p.keys; ++j) {
    for (int64_t d = 0; grad_key && d < p.head_dim; ++d) grad_key.set(j, d, dk[j * p.head_dim + d]);
    for (int64_t d = 0; grad_value && d < p.value_dim; ++d) grad_value.set(j, d, dv[j * p.value_dim + d]);
  }
}

template <class T>
void delta_row(const FusedBackward& p, int64_t entry, int64_t i) {
  using Acc = accumulate_t<T>;
  Rows<T> row(p, entry);
  row.compute(i);
  const double d = delta<T>(p, row, i);
  Out<Acc>(p.batch, entry, p.delta).set(i, 0, d);
  if (Out<Acc> out{p.batch, entry, p.grad_sink_rows}) out.set(i, 0, row.sink_weight == 0 ? 0 : -row.sink_weight * d);
}

// The bias's gradient, dx summed over every dimension in which grad_bias has stride 0. `elements`: of grad_bias from
// the first to the last. Elements in gaps between them are left alone.
template <class T>
void bias_backward(const FusedBackward& p, int64_t elements) {
  Numbers sum(elements);
  T* const data = static_cast<T*>(p.grad_bias.data);
  const auto offset = [&](int64_t entry, int64_t i, int64_t j) {
    return batch_offset(p.batch, entry, p.grad_bias.batch_stride) + i * p.grad_bias.row_stride +
           j * p.grad_bias.col_stride;
  };
  const int64_t entries = p.batch.count();
  for (int64_t entry = 0; entry < entries; ++entry)
    each_logit<T>(p, entry, [&](int64_t i, int64_t j, Rows<T>&, double dx) { sum[offset(entry, i, j)] += dx; });
  for (int64_t entry = 0; entry < entries; ++entry)
    for (int64_t i = 0; i < p.queries; ++i)
      for (int64_t j = 0; j < p.keys; ++j)
        data[offset(entry, i, j)] = narrow<T>(static_cast<accumulate_t<T>>(sum[offset(entry, i, j)]));
}

}  // namespace naive
