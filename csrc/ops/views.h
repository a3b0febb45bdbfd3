// From torch tensors to the kernels' plain structs.
#pragma once
#include "checks.h"

namespace mha::ops {

// Leading dimensions of `t` without the last `matrix_dims`.
inline BatchShape batch_shape(const Tensor& t, int64_t matrix_dims) {
  BatchShape shape;
  shape.ndim = static_cast<int>(t.dim() - matrix_dims);
  for (int d = 0; d < shape.ndim; ++d) shape.size[d] = t.size(d);
  return shape;
}

// The strides of `t` where size 1 may stand for any size, and then has stride 0. Sizes and strides are asked for once:
// every question to a tensor is a call into libtorch.
class BroadcastStrides {
 public:
  BroadcastStrides(const char* name, const Tensor& t) : name_(name), t_(t), sizes_(t.sizes()), strides_(t.strides()) {}

  int64_t of(int64_t dim, int64_t size) const {
    const int64_t own = sizes_[dim];
    require(own == size || own == 1, name_, " must have size 1 or ", size, " in dimension ", dim, ", got shape ",
            shape_text(t_));
    return own == 1 ? 0 : strides_[dim];
  }
  template <class View>
  void set_batch(View& view, const BatchShape& batch) const {
    for (int d = 0; d < batch.ndim; ++d) view.batch_stride[d] = of(d, batch.size[d]);
  }

 private:
  const char* const name_;
  const Tensor& t_;
  const torch::headeronly::IntHeaderOnlyArrayRef sizes_, strides_;
};

// Elements from the first to the last, the gaps between them included.
inline int64_t extent(const Tensor& t) {
  const auto sizes = t.sizes(), strides = t.strides();
  int64_t last = 0;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 0) return 0;
    last += (sizes[d] - 1) * strides[d];
  }
  return last + 1;
}

// A tensor's sizes say nothing of its memory: the storage may have been resized since (untyped_storage().resize_).
inline void require_storage(const char* name, const Tensor& t) {
  const int64_t elements = extent(t);
  if (elements == 0) return;
  int64_t bytes;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(t.get(), &bytes));
  const int64_t needed = (t.storage_offset() + elements) * t.element_size();
  require(needed <= bytes, name, " needs a storage of ", needed, " bytes, but its storage has ", bytes);
}

inline const void* data_of(const char* name, const Input&, const Tensor& t) {
  require_storage(name, t);
  return t.const_data_ptr();
}
inline void* data_of(const char* name, const Output&, const Tensor& t) {
  require_storage(name, t);
  return t.mutable_data_ptr();
}

// By the addresses between first and last element: an input that only steps around `out` counts as shared too.
inline void require_apart_from(const char* name, const Tensor& t, const Tensor& out) {
  const int64_t t_bytes = extent(t) * t.element_size(), out_bytes = extent(out) * out.element_size();
  const auto t_begin = reinterpret_cast<uintptr_t>(t.const_data_ptr());
  const auto out_begin = reinterpret_cast<uintptr_t>(out.const_data_ptr());
  const bool apart = t_begin + t_bytes <= out_begin || out_begin + out_bytes <= t_begin;
  require(apart || t_bytes == 0 || out_bytes == 0, "out must not share memory with ", name,
          ": the addresses from first to last element overlap");
}

// (*, rows, columns), any of them broadcast.
template <class View>
View matrices(const char* name, const Tensor& t, const BatchShape& batch, int64_t rows, int64_t cols) {
  require_dims(name, t, batch.ndim + 2);
  View view;
  const BroadcastStrides strides(name, t);
  strides.set_batch(view, batch);
  view.row_stride = strides.of(batch.ndim, rows);
  view.col_stride = strides.of(batch.ndim + 1, cols);
  view.data = data_of(name, view, t);
  return view;
}

// (*, rows): one number per row.
template <class View>
View row_values(const char* name, const Tensor& t, const BatchShape& batch, int64_t rows) {
  require_dims(name, t, batch.ndim + 1);
  View view;
  const BroadcastStrides strides(name, t);
  strides.set_batch(view, batch);
  view.row_stride = strides.of(batch.ndim, rows);
  view.data = data_of(name, view, t);
  return view;
}

// (*): one number per matrix.
inline Input entry_values(const char* name, const Tensor& t, const BatchShape& batch) {
  require_dims(name, t, batch.ndim);
  Input view;
  BroadcastStrides(name, t).set_batch(view, batch);
  view.data = data_of(name, view, t);
  return view;
}

}  // namespace mha::ops
