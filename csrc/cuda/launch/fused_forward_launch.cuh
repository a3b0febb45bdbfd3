// What the launchers of the fused forward share.
#pragma once
#include "../kernels/fused_forward_call.cuh"
#include "start.cuh"

namespace mha::cuda {

// Starts `blocks` blocks in x, in as many launches as that takes.
template <class Acc>
cudaError_t launch_forward(void (*kernel)(ForwardCall<Acc>), ForwardCall<Acc> call, int64_t blocks, unsigned columns,
                           int threads, int shared_bytes, cudaStream_t stream) {
  for (call.first_block = 0; call.first_block < blocks; call.first_block += kMostBlocks) {
    const int64_t now = min_of(kMostBlocks, blocks - call.first_block);
    const cudaError_t error = start(kernel, now, columns, threads, shared_bytes, stream, call);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// The kernels, in files of their own so that they compile side by side. By multiply-adds:
template <class T>
cudaError_t forward_general(const ForwardCall<accumulate_t<T>>& call, cudaStream_t stream);
// On tensor cores. `size`: the larger of head_dim and value_dim, at most kLargestHead.
template <class T>
cudaError_t forward_plain(const ForwardCall<float>& call, int64_t size, cudaStream_t stream);
template <class T>
cudaError_t forward_options(const ForwardCall<float>& call, int64_t size, cudaStream_t stream);
template <class T>
cudaError_t forward_weights(const ForwardCall<float>& call, int64_t size, cudaStream_t stream);

}  // namespace mha::cuda
