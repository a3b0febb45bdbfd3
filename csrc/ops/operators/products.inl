// The three products. Each is core/problem.h's Product with other strides:
//   scores                     S[h] = scale * Q[h] K[g]^T
//   weighted sum               O[h] = scale * W[h] V[g]
//   weighted sum over queries  Y[g] = scale * sum over the heads h of group g of W[h]^T X[h]
// and their derivatives are each other.

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
  const int64_t head = a.dim() - 3, kv_heads = b.size(head);
  const int64_t group = group_size(op.b_name, b, a.size(head), kv_heads);
  Product p;
  p.dtype = dtype_of(op.a_name, a);
  p.batch = grouped_batch(a, kv_heads, group);
  p.m = a.size(a.dim() - 2);
  p.k = a.size(a.dim() - 1);
  p.n = output_columns(op, b);
  p.a = split_heads(per_head_view<Input>(op.a_name, a, -2, -1), head, group);
  p.b = share_heads(
      op.transpose_b ? per_head_view<Input>(op.b_name, b, -1, -2) : per_head_view<Input>(op.b_name, b, -2, -1), head);
  p.c = split_heads(per_head_view<Output>("out", out, -2, -1), head, group);
  p.alpha = scale;
  p.zero_hides = !op.transpose_b;
  Device::product(p);
}

Tensor per_head(const PerHead& op, const Tensor& a, const Tensor& b, double scale) {
  const Device::Scope scope(a);
  check_per_head(op, a, b);
  Tensor out = allocate(shape_with_tail(a, 1, {output_columns(op, b)}), a.scalar_type());
  run_per_head(op, a, b, scale, out);
  return out;
}

void per_head_out(const PerHead& op, const Tensor& a, const Tensor& b, double scale, const Tensor& out) {
  const Device::Scope scope(a);
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
  const Device::Scope scope(weights);
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
  // The group is summed inside, not a batch dimension.
  const auto per_group = [&](const char* name, const Tensor& t, int64_t row_dim, int64_t col_dim) {
    return share_heads(split_heads(per_head_view<Input>(name, t, row_dim, col_dim), head, group), head);
  };
  p.a = per_group("weights", weights, -1, -2);  // W^T
  p.b = per_group("x", x, -2, -1);
  p.a_group_stride = weights.stride(head);
  p.b_group_stride = x.stride(head);
  p.c = matrices<Output>("out", out, p.batch, p.m, p.n);
  p.alpha = scale;
  p.zero_hides = true;
  Device::product(p);
  return out;
}
