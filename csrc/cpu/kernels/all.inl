// The kernels, once per level. The level's vector header has been included before this file; table.inl follows it,
// after what the level multiplies in its own way.
#include "../simd/vec.h"
// clang-format off
#include "integers.inl"
#include "tiles.inl"
#include "product_split.inl"
#include "pack.inl"
#include "microkernel.inl"
#include "product_output.inl"
#include "panel_rows.inl"
#include "product.inl"
#include "exp.inl"
#include "row.inl"
#include "softmax_forward.inl"
#include "softmax_backward.inl"
#include "dropout.inl"
#include "sum_over.inl"
#include "fused_standin.inl"
// clang-format on
