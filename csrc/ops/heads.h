// Grouped-query attention: the head dimension H of queries becomes (kv_heads, group) and key and value get stride 0 in
// the second, so that they are never repeated.
#pragma once
#include "views.h"

namespace mha::ops {

// Query heads per key/value head.
inline int64_t group_size(const char* name, const Tensor& t, int64_t heads, int64_t kv_heads) {
  require(kv_heads >= 0, "kv_heads must not be negative, got ", kv_heads);
  require(kv_heads == 0 ? heads == 0 : heads % kv_heads == 0, name, " must have a number of heads that divides ", heads,
          ", got ", kv_heads, " in shape ", shape_text(t));
  return kv_heads == 0 ? 1 : heads / kv_heads;
}

inline void require_same_leading(const char* name, const Tensor& t, const Tensor& like, int64_t dims) {
  require_dims(name, t, like.dim());
  for (int64_t d = 0; d < dims; ++d) require_size(name, t, d, like.size(d));
}

// The batch (*, kv_heads, group) of a tensor (*, heads, rows, columns).
inline BatchShape grouped_batch(const Tensor& t, int64_t kv_heads, int64_t group) {
  BatchShape batch = batch_shape(t, 2);
  batch.size[batch.ndim - 1] = kv_heads;
  batch.size[batch.ndim++] = group;
  return batch;
}

// A view over the batch (*, heads) as one over (*, kv_heads, group). `head` is the dimension to be split.
template <class View>
View split_heads(View view, int64_t head, int64_t group) {
  view.batch_stride[head + 1] = view.batch_stride[head];
  view.batch_stride[head] *= group;
  return view;
}

// A view over the batch (*, kv_heads), which a group shares, as one over (*, kv_heads, group).
template <class View>
View share_heads(View view, int64_t head) {
  view.batch_stride[head + 1] = 0;
  return view;
}

// A tensor (*, heads, rows, columns), rows and columns counted as given, negative from the end.
template <class View>
View per_head_view(const char* name, const Tensor& t, int64_t row_dim, int64_t col_dim) {
  View view;
  for (int64_t d = 0; d < t.dim() - 2; ++d) view.batch_stride[d] = t.stride(d);
  view.row_stride = t.stride(t.dim() + row_dim);
  view.col_stride = t.stride(t.dim() + col_dim);
  view.data = data_of(name, view, t);
  return view;
}

}  // namespace mha::ops
