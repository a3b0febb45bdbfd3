// Inside the fused launchers: one kernel with the grid and the shared memory that it needs.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace mha::cuda {

constexpr int64_t kMostBlocks = INT32_MAX;  // of a grid in x
// Bytes. A kernel has to say that it wants more than 48 KB, and that counts what it declares itself.
constexpr int kSharedWithoutAsking = 44 * 1024;

// A grid of `blocks` in x and `columns` in y.
template <class... Parameters, class... Arguments>
cudaError_t start(void (*kernel)(Parameters...), int64_t blocks, unsigned columns, int threads, int shared_bytes,
                  cudaStream_t stream, const Arguments&... arguments) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  if (shared_bytes > kSharedWithoutAsking) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return error;
  }
  kernel<<<dim3(static_cast<unsigned>(blocks), columns), threads, shared_bytes, stream>>>(arguments...);
  return cudaGetLastError();
}

}  // namespace mha::cuda
