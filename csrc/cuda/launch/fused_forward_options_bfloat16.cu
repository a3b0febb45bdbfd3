#include "fused_forward_tensor_cores.cuh"

namespace mha::cuda {
template cudaError_t forward_options<bfloat16>(const ForwardCall<float>&, int64_t, cudaStream_t);
}
