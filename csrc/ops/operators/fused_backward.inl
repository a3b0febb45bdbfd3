// The backward of fused attention.

// A gradient in the memory order of what it belongs to, if wanted.
OptionalTensor grad_like(const Tensor& t, bool wanted) {
  return wanted ? OptionalTensor(allocate_in_order_of(t, t.size(t.dim() - 1))) : std::nullopt;
}

std::tuple<OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor> fused_attention_backward(
    const Tensor& grad_output, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& output,
    const Tensor& row_max, const Tensor& row_sum, double scale, OptionalNumber mask_value, int64_t window_right,
    bool want_query, bool want_key, bool want_value, bool want_bias, const OptionalTensor& grad_weights,
    const OptionalTensor& weights, const OptionalTensor& bias, const OptionalTensor& sinks, const OptionalTensor& mask,
    const OptionalTensor& key_lengths, const OptionalTensor& causal_offsets, const OptionalTensor& seed,
    int64_t window_left, int64_t causal_offset, double softcap, double dropout) {
  const Device::Scope scope(query);
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
  require(weights.has_value() == grad_weights.has_value() || (Device::kAveragesWeights && grad_weights),
          "weights and grad_weights must come together");
  if (grad_weights) {
    require_type("grad_weights", *grad_weights, type);
    p.grad_weights = views.of<Input>("grad_weights", *grad_weights, p.queries, p.keys);
  }
  if (weights) {
    require_type("weights", *weights, type);
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
      if (*grad) Device::set_zero(**grad);
    return {grad_query, grad_key, grad_value, grad_bias, grad_sink_rows};
  }
  Device::fused_backward(p);
  return {grad_query, grad_key, grad_value, grad_bias, grad_sink_rows};
}
