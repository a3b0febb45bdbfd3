#include "fused_backward_tensor_cores.cuh"

namespace mha::cuda {
template cudaError_t backward_plain<bfloat16>(const GradCall<float>&, int64_t, cudaStream_t);
}
