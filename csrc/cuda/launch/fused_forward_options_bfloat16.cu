#include "fused_forward_tensor_cores.cuh"

namespace mha::cuda {

template <>
cudaError_t forward_options<bfloat16>(const ForwardCall<float>& call, int64_t size, cudaStream_t stream) {
  return launch_head<bfloat16, 1, Way::options>(call, size, stream);
}

}  // namespace mha::cuda
