// What the files that hold the backward's kernels on tensor cores share.
#pragma once
#include "../kernels/fused_backward_block.cuh"
#include "fused_backward_launch.cuh"

namespace mha::cuda {

template <class T, int kHead, GradWay kWay>
cudaError_t launch_gradients(const GradCall<float>& call, cudaStream_t stream) {
  const FusedBackward& p = call.p;
  const int64_t entries = p.batch.count();
  cudaError_t error = cudaSuccess;
  if (p.grad_key || p.grad_value)
    error = start(fused_backward_on_tensor_cores<T, kHead, true, kWay>, entries / p.group * ceil_div(p.keys, kGradTile),
                  kThreads, GradShape<T, kHead, true, kWay>::kSharedBytes, stream, call);
  if (error == cudaSuccess && p.grad_query)
    error = start(fused_backward_on_tensor_cores<T, kHead, false, kWay>, entries * ceil_div(p.queries, kGradTile),
                  kThreads, GradShape<T, kHead, false, kWay>::kSharedBytes, stream, call);
  return error;
}

template <class T, GradWay kWay>
cudaError_t launch_gradients(const GradCall<float>& call, int head, cudaStream_t stream) {
  switch (head) {
    case 32: return launch_gradients<T, 32, kWay>(call, stream);
    case 64: return launch_gradients<T, 64, kWay>(call, stream);
    case 96: return launch_gradients<T, 96, kWay>(call, stream);
    case 128: return launch_gradients<T, 128, kWay>(call, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace mha::cuda
