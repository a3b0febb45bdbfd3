// Masked softmax, its backward, and the deterministic sum that gives a broadcast bias its gradient.

std::tuple<Tensor, OptionalTensor> masked_softmax(const Tensor& scores, const OptionalTensor& bias,
                                                  const OptionalTensor& sinks, const OptionalTensor& mask,
                                                  const OptionalTensor& key_lengths,
                                                  const OptionalTensor& causal_offsets, int64_t window_left,
                                                  int64_t window_right, int64_t causal_offset, double softcap,
                                                  OptionalNumber mask_value) {
  const Device::Scope scope(scores);
  require_matrices("scores", scores);
  const ScalarType type = scores.scalar_type();
  SoftmaxForward p;
  p.dtype = dtype_of("scores", scores);
  p.batch = batch_shape(scores, 2);
  p.rows = scores.size(p.batch.ndim);
  p.cols = scores.size(p.batch.ndim + 1);
  p.scores = matrices<Input>("scores", scores, p.batch, p.rows, p.cols);
  p.bias = bias_view(bias, type, p.batch, p.rows, p.cols);
  p.sinks = sinks_view(sinks, type, p.batch);
  p.visibility = visibility({mask, key_lengths, causal_offsets, window_left, window_right, causal_offset}, p.batch,
                            p.rows, p.cols);
  p.softcap = softcap;
  p.mask_value = mask_value_of(mask_value);
  require_softmax_numbers(p.softcap, p.mask_value);

  Tensor weights = allocate(shape_with_tail(scores, 0, {}), type);
  p.weights = matrices<Output>("weights", weights, p.batch, p.rows, p.cols);
  OptionalTensor sink_weights;
  if (sinks) {
    sink_weights = allocate(shape_with_tail(scores, 1, {}), accumulation_type(type));
    p.sink_weights = row_values<Output>("sink_weights", *sink_weights, p.batch, p.rows);
  }
  Device::softmax_forward(p);
  return {weights, sink_weights};
}

std::tuple<Tensor, OptionalTensor, OptionalTensor> masked_softmax_backward(
    const Tensor& weights, const Tensor& grad_weights, const OptionalTensor& sink_weights,
    const OptionalTensor& grad_sink_weights, const OptionalTensor& scores, const OptionalTensor& mask,
    const OptionalTensor& key_lengths, const OptionalTensor& causal_offsets, int64_t window_left, int64_t window_right,
    int64_t causal_offset, double softcap, OptionalNumber mask_value, bool want_grad_logits) {
  const Device::Scope scope(weights);
  require_matrices("weights", weights);
  const ScalarType type = weights.scalar_type(), sums = accumulation_type(type);
  SoftmaxBackward p;
  p.dtype = dtype_of("weights", weights);
  p.batch = batch_shape(weights, 2);
  p.rows = weights.size(p.batch.ndim);
  p.cols = weights.size(p.batch.ndim + 1);
  p.weights = matrices<Input>("weights", weights, p.batch, p.rows, p.cols);
  require_type("grad_weights", grad_weights, type);
  p.grad_weights = matrices<Input>("grad_weights", grad_weights, p.batch, p.rows, p.cols);
  if (sink_weights) {
    require_type("sink_weights", *sink_weights, sums);
    p.sink_weights = row_values<Input>("sink_weights", *sink_weights, p.batch, p.rows);
  }
  if (grad_sink_weights) {
    require(sink_weights.has_value(), "grad_sink_weights needs sink_weights");
    require_type("grad_sink_weights", *grad_sink_weights, sums);
    p.grad_sink_weights = row_values<Input>("grad_sink_weights", *grad_sink_weights, p.batch, p.rows);
  }
  require_softmax_numbers(softcap, mask_value_of(mask_value));
  require(softcap == 0 || scores.has_value(), "softcap needs scores");
  if (softcap != 0) {
    require_type("scores", *scores, type);
    p.scores = matrices<Input>("scores", *scores, p.batch, p.rows, p.cols);
  }
  p.softcap = softcap;
  p.apply_visibility = std::isfinite(mask_value_of(mask_value));
  p.visibility = visibility({mask, key_lengths, causal_offsets, window_left, window_right, causal_offset}, p.batch,
                            p.rows, p.cols);

  Tensor grad_scores = allocate(shape_with_tail(weights, 0, {}), type);
  p.grad_scores = matrices<Output>("grad_scores", grad_scores, p.batch, p.rows, p.cols);
  OptionalTensor grad_logits, grad_sink_rows;
  if (want_grad_logits) {
    grad_logits = allocate(shape_with_tail(weights, 0, {}), type);
    p.grad_logits = matrices<Output>("grad_logits", *grad_logits, p.batch, p.rows, p.cols);
  }
  if (sink_weights) {
    grad_sink_rows = allocate(shape_with_tail(weights, 1, {}), sums);
    p.grad_sink_rows = row_values<Output>("grad_sink_rows", *grad_sink_rows, p.batch, p.rows);
  }
  Device::softmax_backward(p);
  return {grad_scores, grad_logits, grad_sink_rows};
}

Tensor sum_over(const Tensor& x, const std::vector<int64_t>& dims) {
  const Device::Scope scope(x);
  SumOver p;
  p.dtype = dtype_of("x", x);
  require(x.dim() <= kMaxBatchDims, "x has ", x.dim(), " dimensions, at most ", kMaxBatchDims, " are possible");
  p.shape = batch_shape(x, 0);
  bool summed[kMaxBatchDims] = {};
  for (const int64_t dim : dims) {
    require(dim >= 0 && dim < x.dim(), "dims must lie in [0, ", x.dim(), "), got ", dim);
    summed[dim] = true;
  }
  std::vector<int64_t> shape;
  for (int d = 0; d < p.shape.ndim; ++d) shape.push_back(summed[d] ? 1 : p.shape.size[d]);
  Tensor out = allocate(shape, x.scalar_type());
  for (int d = 0; d < p.shape.ndim; ++d) {
    p.x.batch_stride[d] = x.stride(d);
    p.out.batch_stride[d] = summed[d] ? 0 : out.stride(d);
  }
  p.x.data = data_of("x", p.x, x);
  p.out.data = data_of("out", p.out, out);
  Device::sum_over(p);
  return out;
}
