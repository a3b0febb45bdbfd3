// The fused backward on tensor cores, float16: visibility, and nothing else.
#include "fused_backward_tensor_cores.cuh"

namespace mha::cuda {

template <>
cudaError_t backward_plain<float16>(const GradCall<float>& call, int64_t size, cudaStream_t stream) {
  return launch_gradients<float16, GradWay::plain>(call, size, stream);
}

}  // namespace mha::cuda
