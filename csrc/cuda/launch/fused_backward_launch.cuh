// Inside the fused backward's launchers: one kernel with the grid and the shared memory that it needs.
#pragma once
#include "../kernels/fused_backward_call.cuh"

namespace mha::cuda {

// Starts `kernel` with `blocks` blocks in x.
template <class Kernel, class... Arguments>
cudaError_t start(Kernel* kernel, int64_t blocks, int threads, size_t shared, cudaStream_t stream,
                  const Arguments&... arguments) {
  // A kernel has to say that it wants more than 48 KB, and that counts what it declares itself.
  constexpr size_t kSharedWithoutAsking = 44 * 1024;
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  if (shared > kSharedWithoutAsking) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
    if (error != cudaSuccess) return error;
  }
  kernel<<<static_cast<unsigned>(blocks), threads, shared, stream>>>(arguments...);
  return cudaGetLastError();
}

// The kernels, in files of their own so that they compile side by side. By multiply-adds:
template <class T>
cudaError_t gradients_fma(const GradCall<accumulate_t<T>>& call, cudaStream_t stream);
template <class T>
cudaError_t bias_gradient_fma(const GradCall<accumulate_t<T>>& call, cudaStream_t stream);
// On tensor cores. `size`: the larger of head_dim and value_dim, at most kLargestHead.
template <class T>
cudaError_t backward_plain(const GradCall<float>& call, int64_t size, cudaStream_t stream);
template <class T>
cudaError_t backward_options(const GradCall<float>& call, int64_t size, cudaStream_t stream);

}  // namespace mha::cuda
