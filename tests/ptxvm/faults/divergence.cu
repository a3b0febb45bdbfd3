// Instructions of a whole warp or block that not all lanes reach.
#include "launch.cuh"

__global__ void shuffle_in_branch(float* out, const float* in, int n) {
  float x = in[threadIdx.x];
  if (threadIdx.x % 32 < 16) x = __shfl_xor_sync(0xFFFFFFFF, x, 1);  // FAULT shuffle_in_branch
  out[threadIdx.x] = __shfl_xor_sync(0xFFFFFFFF, x, 2);
}
LAUNCHER(shuffle_in_branch, 64, 0)

__global__ void shuffle_from_outside(float* out, const float* in, int n) {
  float x = in[threadIdx.x];
  if (threadIdx.x % 32 < 16) x = __shfl_xor_sync(0x0000FFFF, x, 16);  // FAULT shuffle_from_outside
  out[threadIdx.x] = x;
}
LAUNCHER(shuffle_from_outside, 64, 0)

__global__ void barrier_in_branch(float* out, const float* in, int n) {
  if (threadIdx.x < 32) {
    out[threadIdx.x] = in[threadIdx.x];
    __syncthreads();  // FAULT barrier_in_branch
    out[threadIdx.x] += 1.f;
  } else {
    out[threadIdx.x] = in[threadIdx.x] * 2.f;
    __syncthreads();
    out[threadIdx.x] -= 1.f;
  }
}
LAUNCHER(barrier_in_branch, 64, 0)

__global__ void barrier_of_too_many(float* out, const float* in, int n) {
  asm volatile("bar.sync 1, 96;" ::: "memory");  // FAULT barrier_of_too_many
  out[threadIdx.x] = in[threadIdx.x];
}
LAUNCHER(barrier_of_too_many, 64, 0)

__global__ void trapped(float* out, const float* in, int n) {
  if (in[threadIdx.x] > 1e30f) __trap();
  out[threadIdx.x] = in[threadIdx.x];
  if (threadIdx.x == 40) __trap();  // FAULT trapped
}
LAUNCHER(trapped, 64, 0)

__global__ void unknown_instruction(float* out, const float* in, int n) {
  unsigned x = 1;
  asm volatile("vabsdiff.s32.s32.s32 %0, %0, %0;" : "+r"(x));  // FAULT unknown_instruction
  out[threadIdx.x] = float(x);
}
LAUNCHER(unknown_instruction, 64, 0)

// Waits for what no other thread can do before it leaves the loop.
__global__ void endless(float* out, const float* in, int n) {
  volatile float* flag = out;
  while (*flag == 0.f) {
  }
  out[threadIdx.x] = 1.f;
}
LAUNCHER(endless, 32, 0)
