// The fused backward by multiply-adds, for one element type: each has a file of its own, so that they compile side by
// side.
#pragma once
#include "../kernels/fused_backward_fma.cuh"
#include "../kernels/fused_bias_fma.cuh"
#include "fused_backward_launch.cuh"

namespace mha::cuda {

template <class T>
cudaError_t gradients_fma(const GradCall<accumulate_t<T>>& call, cudaStream_t stream) {
  using Acc = accumulate_t<T>;
  const FusedBackward& p = call.p;
  cudaError_t error = cudaSuccess;
  if (p.grad_key || p.grad_value)
    error = start(fused_key_value_fma<T>, key_tiles_of(p) * key_value_parts<Acc>(p), 1, kGradFmaThreads,
                  sizeof(FmaShared<Acc>), stream, call);
  if (error == cudaSuccess && p.grad_query)
    error = start(fused_query_fma<T>, query_tiles_of(p) * query_parts<Acc>(p), 1, kGradFmaThreads,
                  sizeof(FmaShared<Acc>), stream, call);
  return error;
}

template <class T>
cudaError_t bias_gradient_fma(const GradCall<accumulate_t<T>>& call, cudaStream_t stream) {
  const BiasGrid grid = BiasGrid::of(call.p, kGradTile);
  return start(fused_bias_fma<T>, grid.blocks(), 1, kGradFmaThreads, sizeof(FmaShared<accumulate_t<T>>), stream, call,
               grid);
}

}  // namespace mha::cuda
