#include "fused_backward_tensor_cores.cuh"

namespace mha::cuda {
template cudaError_t backward_options<float16>(const GradCall<float>&, int64_t, cudaStream_t);
template cudaError_t bias_gradient<float16>(const GradCall<float>&, int64_t, cudaStream_t);
}  // namespace mha::cuda
