// The kernels, once per level. The level's vector header has been included before this file.
#include "../simd/vec.h"
// clang-format off
#include "integers.inl"
#include "product.inl"
#include "exp.inl"
#include "row.inl"
#include "softmax_forward.inl"
#include "softmax_backward.inl"
#include "dropout.inl"
#include "sum_over.inl"
#include "table.inl"
// clang-format on
