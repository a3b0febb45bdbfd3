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
const KernelTable kernels_avx512 = make_table("avx512");
}  // namespace mha::cpu
MHA_TARGET_END

#endif
