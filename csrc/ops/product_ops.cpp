// The three products on CPU. Each is core/problem.h's Product with other strides:
//   scores                     S[h] = scale * Q[h] K[g]^T
//   weighted sum               O[h] = scale * W[h] V[g]
//   weighted sum over queries  Y[g] = scale * sum over the heads h of group g of W[h]^T X[h]
// and their derivatives are each other. Grouped-query attention splits the head dimension H into (Hkv, H / Hkv); key
// and value have stride 0 in the second, so they are never repeated.
#include "allocate.h"
#include "launch.h"
#include "views.h"

namespace mha::ops {
namespace {

// Query heads per key/value head.
int64_t group_size(const char* name, const Tensor& t, int64_t heads, int64_t kv_heads) {
  require(kv_heads >= 0, "kv_heads must not be negative, got ", kv_heads);
  require(kv_heads == 0 ? heads == 0 : heads % kv_heads == 0, name, " must have a number of heads that divides ", heads,
          ", got ", kv_heads, " in shape ", shape_text(t));
  return kv_heads == 0 ? 1 : heads / kv_heads;
}

void require_same_leading(const char* name, const Tensor& t, const Tensor& like, int64_t dims) {
  require_dims(name, t, like.dim());
  for (int64_t d = 0; d < dims; ++d) require_size(name, t, d, like.size(d));
}

// Strides of a tensor (*, heads, rows, columns) over the batch (*, kv_heads, group).
template <class View>
View grouped(const char* name, const Tensor& t, int64_t group, bool shared_by_group, int64_t row_dim, int64_t col_dim) {
  View view;
  const int64_t head = t.dim() - 3;
  for (int64_t d = 0; d < head; ++d) view.batch_stride[d] = t.stride(d);
  view.batch_stride[head] = t.stride(head) * (shared_by_group ? 1 : group);
  view.batch_stride[head + 1] = shared_by_group ? 0 : t.stride(head);
  view.row_stride = t.stride(t.dim() + row_dim);
  view.col_stride = t.stride(t.dim() + col_dim);
  view.data = data_of(name, view, t);
  return view;
}

BatchShape grouped_batch(const Tensor& t, int64_t kv_heads, int64_t group) {
  BatchShape batch = batch_shape(t, 2);
  batch.size[batch.ndim - 1] = kv_heads;
  batch.size[batch.ndim++] = group;
  return batch;
}

// C[h] = scale * A[h] B[g(h)], B read as it stands or transposed.
struct PerHead {
  const char* a_name;
  const char* b_name;
  bool transpose_b;
};
constexpr PerHead kScores{"query", "key", true};
constexpr PerHead kWeightedSum{"weights", "value", false};

int64_t output_columns(const PerHead& op, const Tensor& b) { return b.size(b.dim() - (op.transpose_b ? 2 : 1)); }

void check_per_head(const PerHead& op, const Tensor& a, const Tensor& b) {
  require_matrices(op.a_name, a);
  dtype_of(op.a_name, a);
  require_type(op.b_name, b, a.scalar_type());
  require_same_leading(op.b_name, b, a, a.dim() - 3);
  group_size(op.b_name, b, a.size(a.dim() - 3), b.size(b.dim() - 3));
  require_size(op.b_name, b, b.dim() - (op.transpose_b ? 1 : 2), a.size(a.dim() - 1));
}

void run_per_head(const PerHead& op, const Tensor& a, const Tensor& b, double scale, const Tensor& out) {
  const int64_t kv_heads = b.size(b.dim() - 3);
  const int64_t group = group_size(op.b_name, b, a.size(a.dim() - 3), kv_heads);
  Product p;
  p.dtype = dtype_of(op.a_name, a);
  p.batch = grouped_batch(a, kv_heads, group);
  p.m = a.size(a.dim() - 2);
  p.k = a.size(a.dim() - 1);
  p.n = output_columns(op, b);
  p.a = grouped<Input>(op.a_name, a, group, false, -2, -1);
  p.b = op.transpose_b ? grouped<Input>(op.b_name, b, group, true, -1, -2)
                       : grouped<Input>(op.b_name, b, group, true, -2, -1);
  p.c = grouped<Output>("out", out, group, false, -2, -1);
  p.alpha = scale;
  p.zero_hides = !op.transpose_b;
  launch(cpu::kernels().product, p);
}

Tensor per_head(const PerHead& op, const Tensor& a, const Tensor& b, double scale) {
  check_per_head(op, a, b);
  Tensor out = allocate(shape_with_tail(a, 1, {output_columns(op, b)}), a.scalar_type());
  run_per_head(op, a, b, scale, out);
  return out;
}

void per_head_out(const PerHead& op, const Tensor& a, const Tensor& b, double scale, const Tensor& out) {
  check_per_head(op, a, b);
  require_type("out", out, a.scalar_type());
  require_same_leading("out", out, a, a.dim() - 1);
  require_size("out", out, out.dim() - 1, output_columns(op, b));
  require(out.is_contiguous(), "out must be contiguous");
  require_apart_from(op.a_name, a, out);
  require_apart_from(op.b_name, b, out);
  run_per_head(op, a, b, scale, out);
}

Tensor attention_scores(const Tensor& query, const Tensor& key, double scale) {
  return per_head(kScores, query, key, scale);
}

void attention_scores_out(const Tensor& query, const Tensor& key, double scale, const Tensor& out) {
  per_head_out(kScores, query, key, scale, out);
}

Tensor weighted_sum(const Tensor& weights, const Tensor& value, double scale) {
  return per_head(kWeightedSum, weights, value, scale);
}

void weighted_sum_out(const Tensor& weights, const Tensor& value, double scale, const Tensor& out) {
  per_head_out(kWeightedSum, weights, value, scale, out);
}

Tensor weighted_sum_over_queries(const Tensor& weights, const Tensor& x, int64_t kv_heads, double scale) {
  require_matrices("weights", weights);
  require_type("x", x, weights.scalar_type());
  require_same_leading("x", x, weights, weights.dim() - 1);
  const int64_t head = weights.dim() - 3;
  const int64_t group = group_size("kv_heads", weights, weights.size(head), kv_heads);

  Product p;
  p.dtype = dtype_of("weights", weights);
  p.batch = batch_shape(weights, 2);
  p.batch.size[head] = kv_heads;
  p.groups = group;
  p.m = weights.size(head + 2);
  p.k = weights.size(head + 1);
  p.n = x.size(head + 2);
  std::vector<int64_t> shape = shape_with_tail(weights, 3, {kv_heads, p.m, p.n});
  Tensor out = allocate(shape, weights.scalar_type());
  const auto per_group = [&](const char* name, const Tensor& t, int64_t row_dim, int64_t col_dim) {
    Input view = grouped<Input>(name, t, group, false, row_dim, col_dim);
    view.batch_stride[head + 1] = 0;  // the group is summed inside, not a batch dimension
    return view;
  };
  p.a = per_group("weights", weights, -1, -2);  // W^T
  p.b = per_group("x", x, -2, -1);
  p.a_group_stride = weights.stride(head);
  p.b_group_stride = x.stride(head);
  p.c = matrices<Output>("out", out, p.batch, p.m, p.n);
  p.alpha = scale;
  p.zero_hides = true;
  launch(cpu::kernels().product, p);
  return out;
}

}  // namespace
}  // namespace mha::ops

STABLE_TORCH_LIBRARY_IMPL(mha_ext, CPU, m) {
  m.impl("attention_scores", TORCH_BOX(&mha::ops::attention_scores));
  m.impl("attention_scores_out", TORCH_BOX(&mha::ops::attention_scores_out));
  m.impl("weighted_sum", TORCH_BOX(&mha::ops::weighted_sum));
  m.impl("weighted_sum_out", TORCH_BOX(&mha::ops::weighted_sum_out));
  m.impl("weighted_sum_over_queries", TORCH_BOX(&mha::ops::weighted_sum_over_queries));
}
