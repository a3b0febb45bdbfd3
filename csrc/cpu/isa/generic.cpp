// The kernels compiled for the baseline of the architecture. The level to read first, and the second opinion for the others.
#include "baseline.h"

namespace mha::cpu {
namespace {
#include "../simd/vec_generic.h"
#include "../kernels/all.inl"
}  // namespace
const KernelTable kernels_generic = make_table("generic");
}  // namespace mha::cpu
