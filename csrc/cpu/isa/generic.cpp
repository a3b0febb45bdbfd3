// The kernels compiled for the baseline of the architecture. The level to read first, and the second opinion for the
// others.
#include "baseline.h"

namespace mha::cpu {
namespace {
// clang-format off: the order is the order of use
#include "../simd/vec_generic.h"
#include "../simd/transpose_generic.h"
#include "../kernels/all.inl"
#include "../kernels/table.inl"
// clang-format on
}  // namespace
const TypeKernels kernels_generic[] = {kernels_for<double>(), kernels_for<float>(), kernels_for<bfloat16>(),
                                       kernels_for<float16>()};
}  // namespace mha::cpu
