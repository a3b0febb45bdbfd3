#include "fused_backward_fma_launch.cuh"

namespace mha::cuda {
template cudaError_t gradients_fma<float>(const GradCall<float>&, cudaStream_t);
template cudaError_t bias_gradient_fma<float>(const GradCall<float>&, cudaStream_t);
}  // namespace mha::cuda
