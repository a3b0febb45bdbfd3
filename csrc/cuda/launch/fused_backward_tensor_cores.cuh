// What the files that hold the backward's kernels on tensor cores share.
#pragma once
#include "../kernels/fused_bias_block.cuh"
#include "fused_backward_launch.cuh"

namespace mha::cuda {

template <class T, int kHead, GradWay kWay>
cudaError_t launch_gradients(const GradCall<float>& call, cudaStream_t stream) {
  const FusedBackward& p = call.p;
  using KeysStay = GradShape<T, kHead, true, kWay>;
  using QueriesStay = GradShape<T, kHead, false, kWay>;
  cudaError_t error = cudaSuccess;
  if (p.grad_key || p.grad_value)
    error = start(fused_backward_on_tensor_cores<T, kHead, true, kWay>, key_tiles_of(p) * KeysStay::kParts, 1, kThreads,
                  KeysStay::kSharedBytes, stream, call);
  if (error == cudaSuccess && p.grad_query)
    error = start(fused_backward_on_tensor_cores<T, kHead, false, kWay>, query_tiles_of(p) * QueriesStay::kParts, 1,
                  kThreads, QueriesStay::kSharedBytes, stream, call);
  return error;
}

// The smallest tiles that hold heads of `size`. Options take so much longer than the products that fewer sizes do.
template <class T, GradWay kWay>
cudaError_t launch_gradients(const GradCall<float>& call, int64_t size, cudaStream_t stream) {
  if constexpr (kWay == GradWay::plain) {
    if (size <= 32) return launch_gradients<T, 32, kWay>(call, stream);
    if (size > 64 && size <= 96) return launch_gradients<T, 96, kWay>(call, stream);
  }
  if (size <= 64) return launch_gradients<T, 64, kWay>(call, stream);
  if (size <= 128) return launch_gradients<T, 128, kWay>(call, stream);
  return launch_gradients<T, kLargestHead, kWay>(call, stream);
}

template <class T, int kHead>
cudaError_t launch_bias_gradient(const GradCall<float>& call, cudaStream_t stream) {
  using Shape = BiasShape<T, kHead>;
  const BiasGrid grid = BiasGrid::of(call.p, Shape::kMoving);
  return start(fused_bias_on_tensor_cores<T, kHead>, grid.blocks(), 1, kThreads, Shape::kSharedBytes, stream, call,
               grid);
}

template <class T>
cudaError_t bias_gradient(const GradCall<float>& call, int64_t size, cudaStream_t stream) {
  if (size <= 64) return launch_bias_gradient<T, 64>(call, stream);
  if (size <= 128) return launch_bias_gradient<T, 128>(call, stream);
  return launch_bias_gradient<T, kLargestHead>(call, stream);
}

template <class T>
cudaError_t backward_plain(const GradCall<float>& call, int64_t size, cudaStream_t stream) {
  return launch_gradients<T, GradWay::plain>(call, size, stream);
}

template <class T>
cudaError_t backward_options(const GradCall<float>& call, int64_t size, cudaStream_t stream) {
  return launch_gradients<T, GradWay::options>(call, size, stream);
}

}  // namespace mha::cuda
