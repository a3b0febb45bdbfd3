// Inside the fused forward's launchers: one kernel with the grid and the shared memory that it needs.
#pragma once
#include "../kernels/fused_forward_call.cuh"

namespace mha::cuda {

constexpr int64_t kMostBlocks = INT32_MAX;  // of a grid in x
// Bytes. A kernel has to say that it wants more than 48 KB, and that counts what it declares itself.
constexpr int kSharedWithoutAsking = 44 * 1024;

// Starts `blocks` blocks in x, in as many launches as that takes.
template <class Acc>
cudaError_t launch_forward(void (*kernel)(ForwardCall<Acc>), ForwardCall<Acc> call, int64_t blocks, unsigned columns,
                           int threads, int shared_bytes, cudaStream_t stream) {
  if (shared_bytes > kSharedWithoutAsking) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return error;
  }
  for (call.first_block = 0; call.first_block < blocks; call.first_block += kMostBlocks) {
    const dim3 grid(static_cast<unsigned>(min_of(kMostBlocks, blocks - call.first_block)), columns);
    kernel<<<grid, threads, shared_bytes, stream>>>(call);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// The kernels, in files of their own so that they compile side by side. By multiply-adds:
template <class T>
cudaError_t forward_general(const ForwardCall<accumulate_t<T>>& call, cudaStream_t stream);
// On tensor cores. `size`: the larger of head_dim and value_dim, at most kLargestHead.
template <class T>
cudaError_t forward_plain(const ForwardCall<float>& call, int64_t size, cudaStream_t stream);
template <class T>
cudaError_t forward_options(const ForwardCall<float>& call, int64_t size, cudaStream_t stream);
template <class T>
cudaError_t forward_weights(const ForwardCall<float>& call, int64_t size, cudaStream_t stream);

}  // namespace mha::cuda
