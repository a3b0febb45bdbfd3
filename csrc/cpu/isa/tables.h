// What csrc/cpu/isa/*.cpp export: kernels for all element types, in the order of DType, or for bfloat16.
#pragma once
#include "../dispatch/kernel_table.h"

namespace mha::cpu {

extern const TypeKernels kernels_generic[kDTypes];
#if defined(__x86_64__)
extern const TypeKernels kernels_avx2[kDTypes], kernels_avx512[kDTypes];
extern const TypeKernels kernels_avx512_bf16, kernels_amx_bf16;
#endif

}  // namespace mha::cpu
