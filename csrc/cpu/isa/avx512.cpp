// The kernels compiled for AVX-512 (F, BW, DQ, VL).
#include "baseline.h"
#if defined(__x86_64__)

MHA_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
namespace mha::cpu {
namespace {
#include "../simd/vec_avx512.h"
#include "../kernels/all.inl"
}  // namespace
const KernelTable kernels_avx512 = make_table("avx512");
}  // namespace mha::cpu
MHA_TARGET_END

#endif
