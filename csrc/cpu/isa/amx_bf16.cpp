// The kernels compiled for AVX-512 with AMX tiles for bfloat16 products.
#include "baseline.h"
#if defined(__x86_64__)

MHA_TARGET("amx-bf16,amx-tile,avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
namespace mha::cpu {
namespace {
// clang-format off: the order is the order of use
#include "../simd/vec_avx512.h"
#include "../simd/transpose_avx512.h"
#include "../kernels/all.inl"
#include "../kernels/product_pairs.inl"
#include "../kernels/product_tiles.inl"
#include "../kernels/table.inl"
// clang-format on
}  // namespace
const TypeKernels kernels_amx_bf16 = kernels_for<bfloat16>();
}  // namespace mha::cpu
MHA_TARGET_END

#endif
