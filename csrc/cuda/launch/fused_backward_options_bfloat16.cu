// The fused backward on tensor cores, bfloat16: everything.
#include "fused_backward_tensor_cores.cuh"

namespace mha::cuda {

template <>
cudaError_t backward_options<bfloat16>(const GradCall<float>& call, int64_t size, cudaStream_t stream) {
  return launch_gradients<bfloat16, GradWay::options>(call, size, stream);
}

}  // namespace mha::cuda
