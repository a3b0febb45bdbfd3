// Races in shared memory. "FAULT name" marks the line that the checker must name.
#include "launch.cuh"

__global__ void read_before_barrier(float* out, const float* in, int n) {
  __shared__ float x[64];
  x[threadIdx.x] = in[threadIdx.x];
  out[threadIdx.x] = x[threadIdx.x ^ 32];  // FAULT read_before_barrier
}
LAUNCHER(read_before_barrier, 64, 0)

__global__ void write_before_barrier(float* out, const float* in, int n) {
  __shared__ float x[64];
  x[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  const float other = x[threadIdx.x ^ 32];
  x[threadIdx.x] = other + 1.f;  // FAULT write_before_barrier
  __syncthreads();
  out[threadIdx.x] = x[threadIdx.x];
}
LAUNCHER(write_before_barrier, 64, 0)

__global__ void two_writers(float* out, const float* in, int n) {
  __shared__ float x[32];
  x[threadIdx.x % 32] = in[threadIdx.x];  // FAULT two_writers
  __syncthreads();
  out[threadIdx.x] = x[threadIdx.x % 32];
}
LAUNCHER(two_writers, 64, 0)

__global__ void missing_syncwarp(float* out, const float* in, int n) {
  __shared__ float x[32];
  x[threadIdx.x] = in[threadIdx.x];
  out[threadIdx.x] = x[threadIdx.x ^ 1];  // FAULT missing_syncwarp
}
LAUNCHER(missing_syncwarp, 32, 0)

// Right as long as there is a block for every turn.
__global__ void barrier_between_turns(float* out, const float* in, int n) {
  __shared__ float x[64];
  for (int turn = blockIdx.x; turn < 4; turn += gridDim.x) {
    x[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = x[threadIdx.x ^ 32];  // FAULT barrier_between_turns
  }
}
extern "C" int run_barrier_between_turns(float* out, const float* in, int n) {
  barrier_between_turns<<<4, 64>>>(out, in, n);
  return int(cudaGetLastError());
}

__global__ void neighbouring_bytes(float* out, const float* in, int n) {  // clean: bytes of one word, other warps
  __shared__ unsigned char x[64];
  x[threadIdx.x % 32 * 2 + threadIdx.x / 32] = static_cast<unsigned char>(in[threadIdx.x]);
  __syncthreads();
  out[threadIdx.x] = x[threadIdx.x];
}
LAUNCHER(neighbouring_bytes, 64, 0)

__device__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ void arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Warp 0 hands values to warp 1; warps 2 and 3 take no part.
__global__ void producer_and_consumer(float* out, const float* in, int n) {
  __shared__ float x[32];
  if (threadIdx.x < 32) {
    x[threadIdx.x] = in[threadIdx.x];
    arrive(1, 64);
  } else if (threadIdx.x < 64) {
    named_barrier(1, 64);
    out[threadIdx.x - 32] = x[threadIdx.x - 32];
  }
}
LAUNCHER(producer_and_consumer, 128, 0)

// A barrier of other warps orders nothing for warp 3.
__global__ void barrier_of_others(float* out, const float* in, int n) {
  __shared__ float x[32];
  if (threadIdx.x < 32) x[threadIdx.x] = in[threadIdx.x];
  if (threadIdx.x < 64) named_barrier(1, 64);
  if (threadIdx.x >= 96) out[threadIdx.x] = x[threadIdx.x - 96];  // FAULT barrier_of_others
}
LAUNCHER(barrier_of_others, 128, 0)

__global__ void plain_read_of_atomic(float* out, const float* in, int n) {
  __shared__ int count;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  atomicAdd(&count, 1);
  out[threadIdx.x] = float(count);  // FAULT plain_read_of_atomic
}
LAUNCHER(plain_read_of_atomic, 64, 0)
