// The rows that csrc/cpu/isa/*.cpp export.
#pragma once
#include "../dispatch/kernel_table.h"

namespace mha::cpu {

extern const KernelTable kernels_generic;
#if defined(__x86_64__)
extern const KernelTable kernels_avx2, kernels_avx512, kernels_avx512_bf16, kernels_amx_bf16;
#endif

}  // namespace mha::cpu
