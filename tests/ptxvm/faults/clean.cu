// Right code that the checker must leave alone: out[i] = 2 in[i] for 64 threads.
#include <cuda_pipeline.h>

#include "launch.cuh"

// Double buffer with cp.async, a reduction over the block, divergent loops that meet again.
__global__ void pipeline(float* out, const float* in, int n) {
  __shared__ alignas(16) float x[2][64];
  const int steps = 5, thread = threadIdx.x;
  float sum = 0.f;
  __pipeline_memcpy_async(&x[0][thread], &in[thread], sizeof(float));
  __pipeline_commit();
  for (int step = 0; step < steps; ++step) {
    if (step + 1 < steps) __pipeline_memcpy_async(&x[(step + 1) % 2][thread], &in[thread], sizeof(float));
    __pipeline_commit();
    __pipeline_wait_prior(1);
    __syncthreads();
    sum += x[step % 2][thread ^ 33];
    __syncthreads();
  }
  __pipeline_wait_prior(0);
  x[0][thread ^ 33] = sum / steps;
  __syncthreads();
  out[thread] = 2.f * x[0][thread];
}
LAUNCHER(pipeline, 64, 0)

__global__ void warp_exchange(float* out, const float* in, int n) {
  __shared__ float x[64];
  const int thread = threadIdx.x;
  x[thread] = in[thread];
  __syncwarp();
  float y = x[thread ^ 5];
  __syncwarp();
  x[thread ^ 5] = y;
  __syncwarp();
  for (int i = 0; i < thread % 7; ++i) y += float(i);  // lanes leave at different times
  y = __shfl_xor_sync(0xFFFFFFFF, x[thread], 31);
  y = __shfl_xor_sync(0xFFFFFFFF, y, 31);
  if (thread % 32 < 16) y += __shfl_xor_sync(0x0000FFFF, y, 0);
  else y += __shfl_xor_sync(0xFFFF0000, y, 0);
  out[thread] = y;
}
LAUNCHER(warp_exchange, 64, 0)

__global__ void counters(float* out, const float* in, int n) {
  __shared__ unsigned count;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  atomicAdd(&count, 1u);
  const int all = __syncthreads_count(in[threadIdx.x] == in[threadIdx.x]);
  out[threadIdx.x] = count == 64 && all == 64 ? 2.f * in[threadIdx.x] : 0.f;
}
LAUNCHER(counters, 64, 0)

__global__ void early_exit(float* out, const float* in, int n) {
  if (threadIdx.x >= n) return;  // whole warps and single lanes
  __shared__ float x[64];
  x[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = 2.f * x[threadIdx.x];
}
LAUNCHER(early_exit, 128, 0)

struct Large {
  float* out;
  const float* in;
  long long offset[300];
  int n;
};
__device__ int table[4] = {1, 2, 3, 4};
__constant__ float factors[3] = {0.f, 2.f, 5.f};

// A large parameter by value, indexed at run time; local memory; a switch; variables of the module.
__global__ void by_value(const __grid_constant__ Large p) {
  const int thread = threadIdx.x;
  float local[8];
  for (int i = 0; i < 8; ++i) local[i] = p.in[thread] * float(i);
  const Large* address = &p;
  float y = local[address->offset[thread % 300] % 8];  // offset[i] = 2
  switch (thread % 6) {
    case 0: y *= factors[table[0]]; break;
    case 1: y += y; break;
    case 2: y = y - (-y); break;
    case 3: y = 4.f * y / factors[1]; break;
    case 4: y *= 2.f; break;
    case 5: y = ldexpf(y, 1); break;
  }
  p.out[thread] = y / 2.f;
}
extern "C" int run_by_value(float* out, const float* in, int n) {
  Large p{out, in, {}, n};
  for (long long& offset : p.offset) offset = 2;
  by_value<<<dim3(1, 1, 1), 64>>>(p);
  return int(cudaGetLastError());
}
