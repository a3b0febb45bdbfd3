#include "fused_forward_general_launch.cuh"

namespace mha::cuda {
template cudaError_t forward_general<double>(const ForwardCall<double>&, cudaStream_t);
}
