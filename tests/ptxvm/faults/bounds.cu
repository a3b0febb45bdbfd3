// Accesses that should not be.
#include "launch.cuh"

__global__ void load_past_end(float* out, const float* in, int n) {
  out[threadIdx.x] = in[threadIdx.x + 1];  // FAULT load_past_end
}
LAUNCHER(load_past_end, 64, 0)

__global__ void store_before_start(float* out, const float* in, int n) {
  out[int(threadIdx.x) - 1] = in[threadIdx.x];  // FAULT store_before_start
}
LAUNCHER(store_before_start, 64, 0)

__global__ void store_to_input(float* out, const float* in, int n) {
  out[threadIdx.x] = 0.f;
  const_cast<float*>(in)[threadIdx.x] = 0.f;  // FAULT store_to_input
}
LAUNCHER(store_to_input, 64, 0)

__global__ void shared_past_end(float* out, const float* in, int n) {
  extern __shared__ float x[];
  x[threadIdx.x + 1] = in[threadIdx.x];  // FAULT shared_past_end
  __syncthreads();
  out[threadIdx.x] = 0.f;
}
LAUNCHER(shared_past_end, 64, 64 * sizeof(float))

__global__ void misaligned(float* out, const float* in, int n) {
  const float2 pair = *reinterpret_cast<const float2*>(in + 1 + 2 * (threadIdx.x % 8));  // FAULT misaligned
  out[threadIdx.x] = pair.x + pair.y;
}
LAUNCHER(misaligned, 64, 0)

__global__ void uninitialised(float* out, const float* in, int n) {
  __shared__ float x[64];
  if (threadIdx.x < 63) x[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = x[threadIdx.x];  // FAULT uninitialised
}
LAUNCHER(uninitialised, 64, 0)

// The launcher forgets cudaFuncSetAttribute: refused, nothing runs.
__global__ void too_much_shared(float* out, const float* in, int n) {
  extern __shared__ float x[];
  x[threadIdx.x] = 0.f;
  out[threadIdx.x] = x[threadIdx.x];
}
LAUNCHER(too_much_shared, 64, 49 * 1024)
extern "C" int run_enough_shared(float* out, const float* in, int n) {
  cudaFuncSetAttribute(too_much_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, 49 * 1024);
  return run_too_much_shared(out, in, n);
}

// More threads than the kernel allows, and more blocks in y than any GPU does.
__global__ void __launch_bounds__(64) bounded(float* out, const float* in, int n) {
  out[threadIdx.x] = in[threadIdx.x];
}
LAUNCHER(bounded, 96, 0)
extern "C" int run_tall_grid(float* out, const float* in, int n) {
  bounded<<<dim3(1, 65536), 64>>>(out, in, n);
  return int(cudaGetLastError());
}
