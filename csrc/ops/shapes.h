// Shapes and strides of results.
#pragma once
#include <vector>

#include "stable_abi.h"

namespace mha::ops {

using torch::stable::Tensor;

inline std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size());
  int64_t stride = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= shape[d] > 1 ? shape[d] : 1;
  }
  return strides;
}

// Shape of `t` with its last `drop` dimensions replaced by `tail`.
inline std::vector<int64_t> shape_with_tail(const Tensor& t, int64_t drop, std::initializer_list<int64_t> tail) {
  std::vector<int64_t> shape;
  shape.reserve(t.dim() - drop + tail.size());
  for (int64_t d = 0; d < t.dim() - drop; ++d) shape.push_back(t.size(d));
  shape.insert(shape.end(), tail);
  return shape;
}

}  // namespace mha::ops
