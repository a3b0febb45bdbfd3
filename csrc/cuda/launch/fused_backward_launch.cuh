// What the launchers of the fused backward share.
#pragma once
#include "../kernels/fused_backward_call.cuh"
#include "start.cuh"

namespace mha::cuda {

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
template <class T>
cudaError_t bias_gradient(const GradCall<float>& call, int64_t size, cudaStream_t stream);

}  // namespace mha::cuda
