// The normalisation of masks: any dtype to bool.

// Non-zero = may attend. A floating-point mask with a negative value is an additive one in the wrong place, which is
// looked for where that costs no waiting.
Tensor keep_mask(const Tensor& mask) {
  const Device::Scope scope(mask);
  require(mask.dim() <= kMaxBatchDims, "mask has ", mask.dim(), " dimensions, at most ", kMaxBatchDims,
          " are possible");
  Tensor keep = allocate(shape_with_tail(mask, 0, {}), ScalarType::Bool);
  const double lowest = Device::keep_mask(mask, keep);
  require(lowest >= 0, "mask must hold 0 (hidden) and non-zero (may attend), got the negative value ", lowest,
          ": pass an additive mask as bias=");
  return keep;
}
