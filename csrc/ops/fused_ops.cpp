// Fused attention and its backward on CPU.
#include <cstring>

#include "../core/attention.h"
#include "../core/backward_plan.h"
#include "../core/fused_plan.h"
#include "allocate.h"
#include "dropout_arguments.h"
#include "heads.h"
#include "launch.h"
#include "softmax_arguments.h"

namespace mha::ops {
namespace {

// What both operators take alike, as they receive it.
struct AttentionArguments {
  const Tensor &query, &key, &value;
  const OptionalTensor &bias, &sinks;
  VisibilityArguments visibility;
  const OptionalTensor& seed;
  double scale, softcap, mask_value, dropout;
};

// Views over the batch (*, kv_heads, group) of tensors (*, heads, ...), and of those that a group shares.
struct GroupedViews {
  BatchShape batch, kv_batch;  // (*, heads), (*, kv_heads)
  int64_t group;

  int64_t head() const { return batch.ndim - 1; }
  template <class View>
  View split(const View& view) const {
    return split_heads(view, head(), group);
  }
  template <class View>
  View of(const char* name, const Tensor& t, int64_t rows, int64_t cols) const {
    return split(matrices<View>(name, t, batch, rows, cols));
  }
  template <class View>
  View shared(const char* name, const Tensor& t, int64_t rows, int64_t cols) const {
    return share_heads(matrices<View>(name, t, kv_batch, rows, cols), head());
  }
  template <class View>
  View rows(const char* name, const Tensor& t, int64_t n) const {
    return split(row_values<View>(name, t, batch, n));
  }
};

// Sizes above these (of stride 0, in practice) would let products of sizes overflow.
void require_reasonable_sizes(const char* name, const Tensor& t) {
  constexpr int64_t kMostRows = int64_t{1} << 36, kMostColumns = int64_t{1} << 20;
  require(t.size(t.dim() - 2) <= kMostRows && t.size(t.dim() - 1) <= kMostColumns, name, " must have at most ",
          kMostRows, " rows and ", kMostColumns, " columns, got shape ", shape_text(t));
}

void require_attention_inputs(const Tensor& query, const Tensor& key, const Tensor& value) {
  require_matrices("query", query);
  dtype_of("query", query);
  const int64_t head = query.dim() - 3;
  for (const auto& [name, t] : {std::pair{"key", &key}, std::pair{"value", &value}}) {
    require_type(name, *t, query.scalar_type());
    require_same_leading(name, *t, query, head);
  }
  require_size("key", key, head + 2, query.size(head + 2));
  require_size("value", value, head, key.size(head));
  require_size("value", value, head + 1, key.size(head + 1));
  for (const auto& [name, t] : {std::pair{"query", &query}, std::pair{"key", &key}, std::pair{"value", &value}})
    require_reasonable_sizes(name, *t);
}

// Checks the arguments, fills p with what both directions need, and says how to view the rest.
GroupedViews read_arguments(Attention& p, const AttentionArguments& from) {
  require_attention_inputs(from.query, from.key, from.value);
  require(std::isfinite(from.scale), "scale must be finite, got ", from.scale);
  require_softmax_numbers(from.softcap, from.mask_value);
  require_probability("dropout", from.dropout);
  require(from.dropout == 0 || from.seed.has_value(), "dropout needs a seed");
  const int64_t head = from.query.dim() - 3;
  const ScalarType type = from.query.scalar_type();
  GroupedViews views{batch_shape(from.query, 2), batch_shape(from.key, 2), 1};
  p.heads = views.batch.size[head];
  p.group = views.group = group_size("key", from.key, p.heads, views.kv_batch.size[head]);
  p.dtype = dtype_of("query", from.query);
  p.batch = grouped_batch(from.query, views.kv_batch.size[head], p.group);
  p.queries = from.query.size(head + 1);
  p.keys = from.key.size(head + 1);
  p.head_dim = from.query.size(head + 2);
  p.value_dim = from.value.size(head + 2);

  p.query = views.of<Input>("query", from.query, p.queries, p.head_dim);
  p.key = views.shared<Input>("key", from.key, p.keys, p.head_dim);
  p.value = views.shared<Input>("value", from.value, p.keys, p.value_dim);
  p.bias = views.split(bias_view(from.bias, type, views.batch, p.queries, p.keys));
  p.sinks = views.split(sinks_view(from.sinks, type, views.batch));
  p.visibility = visibility(from.visibility, views.batch, p.queries, p.keys);
  for (Input* each : {&p.visibility.mask, &p.visibility.key_lengths, &p.visibility.causal_offsets})
    *each = views.split(*each);

  p.scale = from.scale;
  p.softcap = from.softcap;
  p.mask_value = from.mask_value;
  p.dropout = from.dropout;
  if (from.seed) p.seed = seed_of(*from.seed);
  return views;
}

// The forward; where it is cut into parts of the keys (fused_plan.h), their results are merged in a second phase.
void launch_with_merge(FusedForward& p, ScalarType sums) {
  OptionalTensor partials;
  if (const int64_t count = fused_partials(p)) {
    partials = allocate({count}, sums);
    p.partials = partials->mutable_data_ptr();
  }
  launch_one_by_one(cpu::kernels().fused_forward, p);
  if (p.partials) launch(cpu::kernels().fused_merge, p);
}

std::tuple<Tensor, OptionalTensor, OptionalTensor, OptionalTensor> fused_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, double scale, double mask_value, int64_t window_right,
    bool need_weights, bool need_statistics, const OptionalTensor& bias, const OptionalTensor& sinks,
    const OptionalTensor& mask, const OptionalTensor& key_lengths, const OptionalTensor& causal_offsets,
    const OptionalTensor& seed, int64_t window_left, int64_t causal_offset, double softcap, double dropout) {
  FusedForward p;
  const GroupedViews views =
      read_arguments(p, {query,
                         key,
                         value,
                         bias,
                         sinks,
                         {mask, key_lengths, causal_offsets, window_left, window_right, causal_offset},
                         seed,
                         scale,
                         softcap,
                         mask_value,
                         dropout});
  const ScalarType sums = accumulation_type(query.scalar_type());
  Tensor output = allocate_in_order_of(query, p.value_dim);
  p.output = views.of<Output>("output", output, p.queries, p.value_dim);
  OptionalTensor weights, row_max, row_sum;
  if (need_weights) {
    weights = allocate(shape_with_tail(query, 1, {p.keys}), query.scalar_type());
    p.weights = views.of<Output>("weights", *weights, p.queries, p.keys);
  }
  if (need_statistics) {
    row_max = allocate(shape_with_tail(query, 1, {}), sums);
    row_sum = allocate(shape_with_tail(query, 1, {}), sums);
    p.row_max = views.rows<Output>("row_max", *row_max, p.queries);
    p.row_sum = views.rows<Output>("row_sum", *row_sum, p.queries);
  }
  if (output.numel() > 0 || need_weights || need_statistics) launch_with_merge(p, sums);
  return {output, weights, row_max, row_sum};
}

// A gradient in the memory order of what it belongs to, if wanted.
OptionalTensor grad_like(const Tensor& t, bool wanted) {
  return wanted ? OptionalTensor(allocate_in_order_of(t, t.size(t.dim() - 1))) : std::nullopt;
}

// For gradients of a call without a single logit. They are new and have no gaps.
void set_zero(const OptionalTensor& t) {
  if (t && t->numel() > 0) std::memset(t->mutable_data_ptr(), 0, static_cast<size_t>(t->numel() * t->element_size()));
}

// The gradients of query, key and value: the waves of backward_plan.h, one after another.
void launch_in_waves(FusedBackward& p, const BackwardPlan& plan, ScalarType sums) {
  OptionalTensor workspace;
  if (plan.workspace() > 0) {
    workspace = allocate({plan.workspace()}, sums);
    p.workspace = workspace->mutable_data_ptr();
  }
  for (p.wave = 0; p.wave < plan.waves(); ++p.wave) launch_one_by_one(cpu::kernels().fused_backward, p);
}

std::tuple<OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor> fused_attention_backward(
    const Tensor& grad_output, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& output,
    const Tensor& row_max, const Tensor& row_sum, double scale, double mask_value, int64_t window_right,
    bool want_query, bool want_key, bool want_value, bool want_bias, const OptionalTensor& grad_weights,
    const OptionalTensor& weights, const OptionalTensor& bias, const OptionalTensor& sinks, const OptionalTensor& mask,
    const OptionalTensor& key_lengths, const OptionalTensor& causal_offsets, const OptionalTensor& seed,
    int64_t window_left, int64_t causal_offset, double softcap, double dropout) {
  FusedBackward p;
  const GroupedViews views =
      read_arguments(p, {query,
                         key,
                         value,
                         bias,
                         sinks,
                         {mask, key_lengths, causal_offsets, window_left, window_right, causal_offset},
                         seed,
                         scale,
                         softcap,
                         mask_value,
                         dropout});
  const ScalarType type = query.scalar_type(), sums = accumulation_type(type);
  const auto require_like_output = [&](const char* name, const Tensor& t) {
    require_type(name, t, type);
    require_same_leading(name, t, query, query.dim() - 1);
    require_size(name, t, t.dim() - 1, p.value_dim);
  };
  require_like_output("grad_output", grad_output);
  require_like_output("output", output);
  p.grad_output = views.of<Input>("grad_output", grad_output, p.queries, p.value_dim);
  p.output = views.of<Input>("output", output, p.queries, p.value_dim);
  require(weights.has_value() == grad_weights.has_value(), "weights and grad_weights must come together");
  if (grad_weights) {
    require_type("grad_weights", *grad_weights, type);
    require_type("weights", *weights, type);
    p.grad_weights = views.of<Input>("grad_weights", *grad_weights, p.queries, p.keys);
    p.weights = views.of<Input>("weights", *weights, p.queries, p.keys);
  }
  require_type("row_max", row_max, sums);
  require_type("row_sum", row_sum, sums);
  p.row_max = views.rows<Input>("row_max", row_max, p.queries);
  p.row_sum = views.rows<Input>("row_sum", row_sum, p.queries);
  require(!want_bias || bias.has_value(), "want_bias needs a bias");

  const Tensor delta = allocate(shape_with_tail(query, 1, {}), sums);
  p.delta = views.rows<Output>("delta", delta, p.queries);
  OptionalTensor grad_query = grad_like(query, want_query), grad_key = grad_like(key, want_key),
                 grad_value = grad_like(value, want_value), grad_bias, grad_sink_rows;
  if (grad_query) p.grad_query = views.of<Output>("grad_query", *grad_query, p.queries, p.head_dim);
  if (grad_key) p.grad_key = views.shared<Output>("grad_key", *grad_key, p.keys, p.head_dim);
  if (grad_value) p.grad_value = views.shared<Output>("grad_value", *grad_value, p.keys, p.value_dim);
  if (want_bias) {
    grad_bias = allocate(shape_with_tail(*bias, 0, {}), type);
    p.grad_bias = views.of<Output>("grad_bias", *grad_bias, p.queries, p.keys);
  }
  if (sinks) {
    grad_sink_rows = allocate(shape_with_tail(query, 1, {}), sums);
    p.grad_sink_rows = views.rows<Output>("grad_sink_rows", *grad_sink_rows, p.queries);
  }

  if (p.batch.count() * p.queries * p.keys == 0) {
    for (const OptionalTensor* grad : {&grad_query, &grad_key, &grad_value, &grad_bias, &grad_sink_rows})
      set_zero(*grad);
    return {grad_query, grad_key, grad_value, grad_bias, grad_sink_rows};
  }
  launch(cpu::kernels().fused_delta, p);
  const BackwardPlan plan = backward_plan(p);
  if (want_query || want_key || want_value) launch_in_waves(p, plan, sums);
  if (want_bias && !plan.has_bias) launch_one_by_one(cpu::kernels().fused_bias_backward, p);
  return {grad_query, grad_key, grad_value, grad_bias, grad_sink_rows};
}

}  // namespace
}  // namespace mha::ops

STABLE_TORCH_LIBRARY_IMPL(mha_ext, CPU, m) {
  m.impl("fused_attention", TORCH_BOX(&mha::ops::fused_attention));
  m.impl("fused_attention_backward", TORCH_BOX(&mha::ops::fused_attention_backward));
}
