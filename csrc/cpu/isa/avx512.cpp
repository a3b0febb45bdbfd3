// The kernels compiled for AVX-512 (F, BW, DQ, VL).
#include "baseline.h"
#if defined(__x86_64__)

MHA_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
namespace mha::cpu {
namespace {
// clang-format off: the order is the order of use
#include "../simd/vec_avx512.h"
#include "../simd/transpose_avx512.h"
#include "../kernels/all.inl"
#include "../kernels/table.inl"
// clang-format on
}  // namespace
const TypeKernels kernels_avx512[] = {kernels_for<double>(), kernels_for<float>(), kernels_for<bfloat16>(),
                                      kernels_for<float16>()};
}  // namespace mha::cpu
MHA_TARGET_END

#endif
