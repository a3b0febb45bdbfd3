// The kernels compiled for AVX2 + FMA + F16C.
#include "baseline.h"
#if defined(__x86_64__)

MHA_TARGET("avx2,fma,f16c")
namespace mha::cpu {
namespace {
// clang-format off: the order is the order of use
#include "../simd/vec_avx2.h"
#include "../simd/transpose_avx2.h"
#include "../kernels/all.inl"
#include "../kernels/table.inl"
// clang-format on
}  // namespace
const TypeKernels kernels_avx2[] = {kernels_for<double>(), kernels_for<float>(), kernels_for<bfloat16>(),
                                    kernels_for<float16>()};
}  // namespace mha::cpu
MHA_TARGET_END

#endif
