// What the softmax step and fused attention take alike: visibility, bias, sinks, softcap and mask_value.

// Which keys each query sees, as the operators receive it.
struct VisibilityArguments {
  const OptionalTensor& mask;
  const OptionalTensor& key_lengths;
  const OptionalTensor& causal_offsets;
  int64_t window_left, window_right, causal_offset;
};

Visibility visibility(const VisibilityArguments& from, const BatchShape& batch, int64_t rows, int64_t cols) {
  Visibility v;
  v.window_left = from.window_left;
  v.window_right = from.window_right;
  v.causal_offset = from.causal_offset;
  require(from.window_left != INT64_MIN, "window_left must be above -2^63");  // its negation is needed
  if (from.mask) {
    require_type("mask", *from.mask, ScalarType::Bool);
    v.mask = matrices<Input>("mask", *from.mask, batch, rows, cols);
  }
  if (from.key_lengths) {
    require_type("key_lengths", *from.key_lengths, ScalarType::Long);
    v.key_lengths = entry_values("key_lengths", *from.key_lengths, batch);
  }
  if (from.causal_offsets) {
    require_type("causal_offsets", *from.causal_offsets, ScalarType::Long);
    v.causal_offsets = entry_values("causal_offsets", *from.causal_offsets, batch);
  }
  return v;
}

Input bias_view(const OptionalTensor& bias, ScalarType type, const BatchShape& batch, int64_t rows, int64_t cols) {
  if (!bias) return {};
  require_type("bias", *bias, type);
  return matrices<Input>("bias", *bias, batch, rows, cols);
}

Input sinks_view(const OptionalTensor& sinks, ScalarType type, const BatchShape& batch) {
  if (!sinks) return {};
  require_type("sinks", *sinks, type);
  return entry_values("sinks", *sinks, batch);
}

double mask_value_of(OptionalNumber mask_value) { return mask_value.value_or(-INFINITY); }

void require_softmax_numbers(double softcap, double mask_value) {
  require(softcap >= 0 && std::isfinite(softcap), "softcap must be positive and finite, or 0 for none, got ", softcap);
  require(!std::isnan(mask_value) && mask_value < INFINITY, "mask_value must be -inf or finite, got ", mask_value);
}
