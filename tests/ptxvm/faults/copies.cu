// Faults with cp.async.
#include "launch.cuh"

__device__ void copy(float* to, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(unsigned(__cvta_generic_to_shared(to))), "l"(from)
               : "memory");
}
__device__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int pending>
__device__ void wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

__global__ void missing_wait(float* out, const float* in, int n) {
  __shared__ float x[64];
  copy(&x[threadIdx.x], &in[threadIdx.x]);
  commit();
  __syncthreads();
  out[threadIdx.x] = x[threadIdx.x];  // FAULT missing_wait
}
LAUNCHER(missing_wait, 64, 0)

__global__ void wait_for_too_few(float* out, const float* in, int n) {
  __shared__ float x[2][64];
  for (int stage = 0; stage < 2; ++stage) copy(&x[stage][threadIdx.x], &in[threadIdx.x]), commit();
  wait<1>();
  __syncthreads();
  out[threadIdx.x] = x[0][threadIdx.x] + x[1][threadIdx.x];  // FAULT wait_for_too_few
  wait<0>();
}
LAUNCHER(wait_for_too_few, 64, 0)

__global__ void wait_without_barrier(float* out, const float* in, int n) {
  __shared__ float x[64];
  copy(&x[threadIdx.x], &in[threadIdx.x]);
  commit();
  wait<0>();
  out[threadIdx.x] = x[threadIdx.x ^ 32];  // FAULT wait_without_barrier
}
LAUNCHER(wait_without_barrier, 64, 0)

__global__ void overwritten_in_flight(float* out, const float* in, int n) {
  __shared__ float x[64];
  copy(&x[threadIdx.x], &in[threadIdx.x]);
  commit();
  x[threadIdx.x] = 1.f;  // FAULT overwritten_in_flight
  wait<0>();
  __syncthreads();
  out[threadIdx.x] = x[threadIdx.x];
}
LAUNCHER(overwritten_in_flight, 64, 0)

__global__ void source_out_of_bounds(float* out, const float* in, int n) {
  __shared__ float x[64];
  copy(&x[threadIdx.x], &in[threadIdx.x + n]);
  commit();
  wait<0>();
  __syncthreads();
  out[threadIdx.x] = 0.f;
}
LAUNCHER(source_out_of_bounds, 64, 0)
