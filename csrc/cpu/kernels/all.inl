// The kernels, once per level. The level's vector header has been included before this file.
#include "../simd/vec.h"
// clang-format off
#include "product.inl"
#include "softmax.inl"
#include "dropout.inl"
#include "sum_over.inl"
#include "table.inl"
// clang-format on
