// Where the matrices of a batch entry begin.
#pragma once
#include "inline.h"
#include "problem.h"

namespace mha {

// Flat batch index -> offset in elements, for tensors that share `shape` but have their own strides.
MHA_INLINE int64_t batch_offset(const BatchShape& shape, int64_t flat, const int64_t* strides) {
  int64_t offset = 0;
  for (int d = shape.ndim - 1; d >= 0; --d) {
    const int64_t rest = flat / shape.size[d];
    offset += (flat - rest * shape.size[d]) * strides[d];
    flat = rest;
  }
  return offset;
}

template <class T, class Pointer>
MHA_INLINE T* matrix(const BatchShape& shape, int64_t flat, const Strided<Pointer>& stack) {
  return static_cast<T*>(stack.data) + batch_offset(shape, flat, stack.batch_stride);
}

}  // namespace mha
