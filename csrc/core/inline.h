// MHA_INLINE: a helper shared by the CPU kernels of every ISA level and by the CUDA kernels. `static` and
// always_inline, so that no copy compiled for one instruction set can be linked into code for another.
#pragma once

#if defined(__CUDACC__)
#define MHA_INLINE static __host__ __device__ __forceinline__
#else
#define MHA_INLINE static inline __attribute__((always_inline))
#endif
