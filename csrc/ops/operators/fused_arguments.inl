// What fused attention and its backward take alike.

// What both operators take alike, as they receive it.
struct AttentionArguments {
  const Tensor &query, &key, &value;
  const OptionalTensor &bias, &sinks;
  VisibilityArguments visibility;
  const OptionalTensor& seed;
  double scale, softcap;
  OptionalNumber mask_value;
  double dropout;
};

// Views over the batch (*, kv_heads, group) of tensors (*, heads, ...), and of those that a group shares.
struct GroupedViews {
  BatchShape batch, kv_batch;  // (*, heads), (*, kv_heads)
  int64_t group;

  int64_t head() const { return batch.ndim - 1; }
  template <class View>
  View split(const View& view) const {
    return split_heads(view, head(), group);
  }
  template <class View>
  View of(const char* name, const Tensor& t, int64_t rows, int64_t cols) const {
    return split(matrices<View>(name, t, batch, rows, cols));
  }
  template <class View>
  View shared(const char* name, const Tensor& t, int64_t rows, int64_t cols) const {
    return share_heads(matrices<View>(name, t, kv_batch, rows, cols), head());
  }
  template <class View>
  View rows(const char* name, const Tensor& t, int64_t n) const {
    return split(row_values<View>(name, t, batch, n));
  }
};

// Sizes above these (of stride 0, in practice) would let products of sizes overflow.
void require_reasonable_sizes(const char* name, const Tensor& t) {
  constexpr int64_t kMostRows = int64_t{1} << 36, kMostColumns = int64_t{1} << 20;
  require(t.size(t.dim() - 2) <= kMostRows && t.size(t.dim() - 1) <= kMostColumns, name, " must have at most ",
          kMostRows, " rows and ", kMostColumns, " columns, got shape ", shape_text(t));
}

void require_attention_inputs(const Tensor& query, const Tensor& key, const Tensor& value) {
  require_matrices("query", query);
  dtype_of("query", query);
  const int64_t head = query.dim() - 3;
  for (const auto& [name, t] : {std::pair{"key", &key}, std::pair{"value", &value}}) {
    require_type(name, *t, query.scalar_type());
    require_same_leading(name, *t, query, head);
  }
  require_size("key", key, head + 2, query.size(head + 2));
  require_size("value", value, head, key.size(head));
  require_size("value", value, head + 1, key.size(head + 1));
  for (const auto& [name, t] : {std::pair{"query", &query}, std::pair{"key", &key}, std::pair{"value", &value}})
    require_reasonable_sizes(name, *t);
}

// Checks the arguments, fills p with what both directions need, and says how to view the rest.
GroupedViews read_arguments(Attention& p, const AttentionArguments& from) {
  require_attention_inputs(from.query, from.key, from.value);
  require(std::isfinite(from.scale), "scale must be finite, got ", from.scale);
  require_softmax_numbers(from.softcap, mask_value_of(from.mask_value));
  require_probability("dropout", from.dropout);
  require(from.dropout == 0 || from.seed.has_value(), "dropout needs a seed");
  const int64_t head = from.query.dim() - 3;
  const ScalarType type = from.query.scalar_type();
  GroupedViews views{batch_shape(from.query, 2), batch_shape(from.key, 2), 1};
  p.heads = views.batch.size[head];
  p.group = views.group = group_size("key", from.key, p.heads, views.kv_batch.size[head]);
  p.dtype = dtype_of("query", from.query);
  p.batch = grouped_batch(from.query, views.kv_batch.size[head], p.group);
  p.queries = from.query.size(head + 1);
  p.keys = from.key.size(head + 1);
  p.head_dim = from.query.size(head + 2);
  p.value_dim = from.value.size(head + 2);

  p.query = views.of<Input>("query", from.query, p.queries, p.head_dim);
  p.key = views.shared<Input>("key", from.key, p.keys, p.head_dim);
  p.value = views.shared<Input>("value", from.value, p.keys, p.value_dim);
  p.bias = views.split(bias_view(from.bias, type, views.batch, p.queries, p.keys));
  p.sinks = views.split(sinks_view(from.sinks, type, views.batch));
  p.visibility = visibility(from.visibility, views.batch, p.queries, p.keys);
  for (Input* each : {&p.visibility.mask, &p.visibility.key_lengths, &p.visibility.causal_offsets})
    *each = views.split(*each);

  p.scale = from.scale;
  p.softcap = from.softcap;
  p.mask_value = mask_value_of(from.mask_value);
  p.dropout = from.dropout;
  if (from.seed) p.seed = seed_of(*from.seed);
  return views;
}
