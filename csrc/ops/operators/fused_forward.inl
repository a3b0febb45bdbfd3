// Fused attention.

std::tuple<Tensor, OptionalTensor, OptionalTensor, OptionalTensor> fused_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, double scale, OptionalNumber mask_value,
    int64_t window_right, bool need_weights, bool need_statistics, const OptionalTensor& bias,
    const OptionalTensor& sinks, const OptionalTensor& mask, const OptionalTensor& key_lengths,
    const OptionalTensor& causal_offsets, const OptionalTensor& seed, int64_t window_left, int64_t causal_offset,
    double softcap, double dropout, bool average_weights) {
  const Device::Scope scope(query);
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
    std::vector<int64_t> shape = shape_with_tail(query, 1, {p.keys});
    if (average_weights) {
      require(Device::kAveragesWeights, "average_weights has no kernel for this device");
      require(p.heads > 0, "average_weights needs heads, got query of shape ", shape_text(query));
      shape[shape.size() - 3] = 1;
      p.average = true;
    }
    weights = allocate(shape, query.scalar_type());
    p.weights = views.of<Output>("weights", *weights, p.queries, p.keys);
  }
  if (need_statistics) {
    row_max = allocate(shape_with_tail(query, 1, {}), sums);
    row_sum = allocate(shape_with_tail(query, 1, {}), sums);
    p.row_max = views.rows<Output>("row_max", *row_max, p.queries);
    p.row_sum = views.rows<Output>("row_sum", *row_sum, p.queries);
  }
  if (output.numel() > 0 || need_weights || need_statistics) Device::fused_forward(p);
  return {output, weights, row_max, row_sum};
}
