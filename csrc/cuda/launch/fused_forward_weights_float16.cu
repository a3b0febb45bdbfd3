#include "fused_forward_tensor_cores.cuh"

namespace mha::cuda {

template <>
cudaError_t forward_weights<float16>(const ForwardCall<float>& call, int head, cudaStream_t stream) {
  return launch_head<float16, 1, Way::weights>(call, head, stream);
}

}  // namespace mha::cuda
