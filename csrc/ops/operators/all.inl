// The operators, once per device. `Device` has been named before this file, see cpu/operators.cpp.
// clang-format off
#include "type_check.inl"
#include "allocate.inl"
#include "products.inl"
#include "softmax_arguments.inl"
#include "softmax.inl"
#include "dropout.inl"
#include "masks.inl"
#include "fused_arguments.inl"
#include "fused_forward.inl"
#include "fused_backward.inl"
// clang-format on

template <class Library>
void implement_all(Library& m) {
  m.impl("attention_scores", TORCH_BOX(&attention_scores));
  m.impl("attention_scores_out", TORCH_BOX(&attention_scores_out));
  m.impl("weighted_sum", TORCH_BOX(&weighted_sum));
  m.impl("weighted_sum_out", TORCH_BOX(&weighted_sum_out));
  m.impl("weighted_sum_over_queries", TORCH_BOX(&weighted_sum_over_queries));
  m.impl("masked_softmax", TORCH_BOX(&masked_softmax));
  m.impl("masked_softmax_backward", TORCH_BOX(&masked_softmax_backward));
  m.impl("sum_over", TORCH_BOX(&sum_over));
  m.impl("fused_attention", TORCH_BOX(&fused_attention));
  m.impl("fused_attention_backward", TORCH_BOX(&fused_attention_backward));
  m.impl("dropout", TORCH_BOX(&dropout));
  m.impl("keep_mask", TORCH_BOX(&keep_mask));
}
