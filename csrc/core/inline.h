// MHA_INLINE: a helper shared by the CPU kernels of every ISA level and by the CUDA kernels. `static` and
// always_inline, so that no copy compiled for one instruction set can be linked into code for another.
// MHA_INLINE_MEMBER: the same for a member function, where `static` would mean something else.
#pragma once

#if defined(__CUDACC__)
#define MHA_INLINE static __host__ __device__ __forceinline__
#define MHA_INLINE_MEMBER __host__ __device__ __forceinline__
#else
#define MHA_INLINE static inline __attribute__((always_inline))
#define MHA_INLINE_MEMBER inline __attribute__((always_inline))
#endif
