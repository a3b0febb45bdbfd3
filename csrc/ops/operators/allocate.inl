// New tensors for results.

// Contiguous.
Tensor allocate(const std::vector<int64_t>& shape, ScalarType type) {
  return Device::allocate(shape, contiguous_strides(shape), type);
}

// (*, heads, length, columns) with the leading dimensions, the dtype and the memory order of `like`: heads inside
// length, (*, length, heads, columns), where those of `like` are.
Tensor allocate_in_order_of(const Tensor& like, int64_t columns) {
  std::vector<int64_t> shape = shape_with_tail(like, 1, {columns});
  const size_t head = shape.size() - 3, length = head + 1;
  const bool heads_inside = shape[head] > 1 && shape[length] > 1 && like.stride(head) < like.stride(length);
  if (!heads_inside) return allocate(shape, like.scalar_type());
  std::swap(shape[head], shape[length]);
  std::vector<int64_t> strides = contiguous_strides(shape);
  std::swap(shape[head], shape[length]);
  std::swap(strides[head], strides[length]);
  return Device::allocate(shape, strides, like.scalar_type());
}
