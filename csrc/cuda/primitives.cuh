// All inline PTX: one instruction, one function. Everything here is valid from compute_80 on.
//
// A 16-bit matrix operand lies in the registers of a warp in fragments (PTX manual, "mma.m16n8k16"). With
// g = lane / 4 and t = lane % 4, and two neighbouring elements in a register, the lower column in the low half:
//   A, 16 x 16   a[0] = (row g,     columns 2t, 2t + 1)    a[1] = (row g + 8, the same)
//                a[2] = (row g, columns 2t + 8, 2t + 9)    a[3] = (row g + 8, the same)
//   B, 16 x 8    b0   = (rows 2t, 2t + 1, column g)        b1   = (rows 2t + 8, 2t + 9, column g)
//   C, 16 x 8    c[0], c[1] = (row g, columns 2t, 2t + 1)  c[2], c[3] = (row g + 8, the same)
// So two neighbouring tiles C, narrowed and packed, are one A: that is how weights go from one product to the next.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "../core/half.h"

#define MHA_DEVICE static __device__ __forceinline__

namespace mha::cuda {

// Where shared memory begins, as instructions on shared memory want it: 32 bits.
MHA_DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// c += a b, 16 x 16 times 16 x 8, products of 16-bit elements summed in float.
template <class T>
MHA_DEVICE void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    static_assert(std::is_same_v<T, float16>);
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Four 8 x 8 matrices of 16-bit elements from shared memory. Lane l names row l % 8 of matrix l / 8 (16 bytes,
// aligned); r[i] gets (row g, columns 2t, 2t + 1) of matrix i.
MHA_DEVICE void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// The same transposed: r[i] gets (rows 2t, 2t + 1, column g) of matrix i.
MHA_DEVICE void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// 16 bytes from global to shared memory, both aligned, without waiting and past the first-level cache.
MHA_DEVICE void copy_async(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(shared), "l"(global) : "memory");
}

// The same, or 16 zero bytes; then `global` is not read.
MHA_DEVICE void copy_async_or_zero(uint32_t shared, const void* global, bool copy) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(shared), "l"(global), "r"(copy ? 16 : 0) : "memory");
}

// Ends a group of this thread's copies.
MHA_DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `kPending` groups of this thread are under way. Other threads' copies are there after a barrier.
template <int kPending>
MHA_DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// 2^x within 2 units in the last place; 0 below 2^-126, NaN for NaN.
MHA_DEVICE float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats rounded to T, `low` in the low half.
template <class T>
MHA_DEVICE uint32_t pack(float low, float high) {
  uint32_t both;
  if constexpr (std::is_same_v<T, bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(both) : "f"(high), "f"(low));
  } else {
    static_assert(std::is_same_v<T, float16>);
    asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(both) : "f"(high), "f"(low));
  }
  return both;
}

// 4 or 16 bytes of shared memory.
MHA_DEVICE void store_shared(uint32_t address, uint32_t x) {
  asm volatile("st.shared.u32 [%0],%1;" ::"r"(address), "r"(x) : "memory");
}
MHA_DEVICE uint4 load_shared_16(uint32_t address) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

// Keeps the compiler from working out ahead, and keeping, all that follows from x.
MHA_DEVICE int worked_out_here(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace mha::cuda
