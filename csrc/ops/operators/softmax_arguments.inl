// What the softmax step and fused attention take alike: visibility, bias, sinks, softcap and mask_value.

// Which keys each query sees, as the operators receive it.
struct VisibilityArguments {
  const OptionalTensor& mask;
  const OptionalTensor& key_lengths;
  const OptionalTensor& causal_offsets;
  int64_t window_left, window_right, causal_offset;
};

// Positions and distances end here. The backward of the CUDA kernels turns i + offset + right >= j around, which would
// give other pairs where a sum of them stops at the ends of int64.
void require_near(const char* name, int64_t x) {
  constexpr int64_t kLimit = int64_t{1} << 60;
  require(-kLimit <= x && x <= kLimit, name, " must stay within 2^60, got ", x);
}

Visibility visibility(const VisibilityArguments& from, const BatchShape& batch, int64_t rows, int64_t cols) {
  Visibility v;
  v.window_left = from.window_left;
  v.window_right = from.window_right;
  v.causal_offset = from.causal_offset;
  if (from.window_left != INT64_MAX) require_near("window_left", from.window_left);
  if (from.window_right != INT64_MAX) require_near("window_right", from.window_right);
  require_near("causal_offset", from.causal_offset);
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
