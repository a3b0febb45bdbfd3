// The kernels compiled for AVX-512 with BF16 dot products.
#include "baseline.h"
#if defined(__x86_64__)

MHA_TARGET("avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
namespace mha::cpu {
namespace {
#include "../simd/vec_avx512.h"
#include "../kernels/all.inl"
}  // namespace
const KernelTable kernels_avx512_bf16 = make_table("avx512_bf16");
}  // namespace mha::cpu
MHA_TARGET_END

#endif
