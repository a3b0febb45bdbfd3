#include "fused_forward_general_launch.cuh"

namespace mha::cuda {
template cudaError_t forward_general<bfloat16>(const ForwardCall<float>&, cudaStream_t);
}
