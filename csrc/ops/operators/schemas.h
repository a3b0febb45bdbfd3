// The operators' schemas. They are private: users call the Python functions, which add checks,
// autograd and defaults. Meaning of each argument: docs/notation.md, core/problem.h and
// core/attention.h.
//
// Every tensor has all dimensions: (*, heads, rows, columns). What broadcasts has size 1 there, except that the head
// dimension of key and value may be a divisor of the query's (grouped-query attention).
#pragma once
#include <string>

namespace mha::ops {

template <class Library>
void define_all(Library& m) {
  // Products
  m.def("attention_scores(Tensor query, Tensor key, float scale) -> Tensor");
  m.def("attention_scores_out(Tensor query, Tensor key, float scale, Tensor(a!) out) -> ()");
  m.def("weighted_sum(Tensor weights, Tensor value, float scale) -> Tensor");
  m.def("weighted_sum_out(Tensor weights, Tensor value, float scale, Tensor(a!) out) -> ()");
  m.def("weighted_sum_over_queries(Tensor weights, Tensor x, SymInt kv_heads, float scale) -> Tensor");

  // Softmax. window_left, window_right: 2^63 - 1 means unbounded. softcap: 0 means none. mask_value: None means -inf,
  // which not all that stores programs can store.
  m.def(
      "masked_softmax(Tensor scores, Tensor? bias, Tensor? sinks, Tensor? mask, Tensor? key_lengths,"
      " Tensor? causal_offsets, SymInt window_left, SymInt window_right, SymInt causal_offset, float softcap, float? "
      "mask_value)"
      " -> (Tensor weights, Tensor? sink_weights)");
  m.def(
      "masked_softmax_backward(Tensor weights, Tensor grad_weights, Tensor? sink_weights, Tensor? grad_sink_weights,"
      " Tensor? scores, Tensor? mask, Tensor? key_lengths, Tensor? causal_offsets, SymInt window_left, SymInt "
      "window_right,"
      " SymInt causal_offset, float softcap, float? mask_value, bool want_grad_logits)"
      " -> (Tensor grad_scores, Tensor? grad_logits, Tensor? grad_sink_rows)");
  m.def("sum_over(Tensor x, int[] dims) -> Tensor");

  // Attention without the matrix of scores. dropout: 0 means none, and then there is no seed. row_max and row_sum are
  // the business of the backward, on the same instruction-set level. What every call says comes first: converting an
  // argument from Python takes longer than a default, and both together up to half the time of a small call.
  // average_weights (CPU): weights have one head, the mean of all. The backward takes the gradient of each head's.
  m.def(
      "fused_attention(Tensor query, Tensor key, Tensor value, float scale, float? mask_value, SymInt window_right,"
      " bool need_weights, bool need_statistics,"
      " Tensor? bias=None, Tensor? sinks=None, Tensor? mask=None, Tensor? key_lengths=None,"
      " Tensor? causal_offsets=None, Tensor? seed=None, SymInt window_left=9223372036854775807, SymInt causal_offset=0,"
      " float softcap=0.0, float dropout=0.0, bool average_weights=False)"
      " -> (Tensor output, Tensor? weights, Tensor? row_max, Tensor? row_sum)");
  m.def(
      "fused_attention_backward(Tensor grad_output, Tensor query, Tensor key, Tensor value, Tensor output,"
      " Tensor row_max, Tensor row_sum, float scale, float? mask_value, SymInt window_right, bool want_query, bool "
      "want_key,"
      " bool want_value, bool want_bias, Tensor? grad_weights=None, Tensor? weights=None,"
      " Tensor? bias=None, Tensor? sinks=None, Tensor? mask=None, Tensor? key_lengths=None,"
      " Tensor? causal_offsets=None, Tensor? seed=None, SymInt window_left=9223372036854775807, SymInt causal_offset=0,"
      " float softcap=0.0, float dropout=0.0)"
      " -> (Tensor? grad_query, Tensor? grad_key, Tensor? grad_value, Tensor? grad_bias, Tensor? grad_sink_rows)");

  // Dropout and masks
  m.def("dropout(Tensor weights, Tensor seed, float p) -> Tensor");
  m.def("keep_mask(Tensor mask) -> Tensor");
}

// All of them, a line each.
inline std::string schemas_as_text() {
  struct {
    std::string text;
    void def(const char* schema) { text.append(schema).push_back('\n'); }
  } lines;
  define_all(lines);
  return lines.text;
}

}  // namespace mha::ops
