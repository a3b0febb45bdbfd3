// The CUDA kernels as the operators call them: what cpu/dispatch/kernel_table.h is for the CPU.
//
// Each function starts its kernels on `stream` and returns the first error. Nothing waits and nothing is allocated, so
// that calls can be captured in CUDA graphs. All pointers of a problem are device memory.
#pragma once
#include <cuda_runtime_api.h>

#include "../core/attention.h"

namespace mha::cuda {

cudaError_t product(const Product& p, cudaStream_t stream);
cudaError_t softmax_forward(const SoftmaxForward& p, cudaStream_t stream);
cudaError_t softmax_backward(const SoftmaxBackward& p, cudaStream_t stream);
cudaError_t dropout(const Dropout& p, cudaStream_t stream);
cudaError_t keep_mask(const KeepMask& p, cudaStream_t stream);

// Elements of the accumulation type that SumOver::partials must hold; 0: none.
int64_t sum_partials(const SumOver& p);
cudaError_t sum_over(const SumOver& p, cudaStream_t stream);

// The same of FusedForward::partials.
int64_t forward_partials(const FusedForward& p);
cudaError_t fused_forward(const FusedForward& p, cudaStream_t stream);

// The same of FusedBackward::workspace.
int64_t backward_workspace(const FusedBackward& p);
cudaError_t fused_backward(const FusedBackward& p, cudaStream_t stream);

}  // namespace mha::cuda
