// The fused backward: which kernels a call takes.
#include "../kernels/fused_delta.cuh"
#include "../kernels/fused_tiles.cuh"
#include "../launch.h"
#include "fused_backward_launch.cuh"

namespace mha::cuda {
namespace {

int64_t head_size(const FusedBackward& p) { return max_of(p.head_dim, p.value_dim); }

bool on_tensor_cores(const FusedBackward& p) {
  return (p.dtype == DType::bf16 || p.dtype == DType::f16) && head_size(p) <= kLargestHead;
}

template <class T>
GradCall<accumulate_t<T>> call_of(const FusedBackward& p) {
  GradCall<accumulate_t<T>> call{p, Logits<accumulate_t<T>>::of(p), scale_of_kept<accumulate_t<T>>(p),
                                 dropout_threshold(p.dropout) > 0};
  if (!on_tensor_cores(p)) return call;
  call.rows = static_cast<float*>(p.workspace);
  call.query_chunks = lies_in_chunks(p.batch, p.query, p.head_dim);
  call.key_chunks = lies_in_chunks(p.batch, p.key, p.head_dim);
  call.value_chunks = lies_in_chunks(p.batch, p.value, p.value_dim);
  call.grad_chunks = lies_in_chunks(p.batch, p.grad_output, p.value_dim);
  return call;
}

template <class T>
cudaError_t delta(const GradCall<accumulate_t<T>>& call, cudaStream_t stream) {
  return start(fused_delta<T>, ceil_div(call.p.batch.count() * delta_rows(call), kDeltaRows), 1, kDeltaThreads, 0,
               stream, call);
}

template <class T>
cudaError_t gradients_on_tensor_cores(const GradCall<float>& call, cudaStream_t stream) {
  const FusedBackward& p = call.p;
  if (!p.grad_query && !p.grad_key && !p.grad_value) return cudaSuccess;
  const bool chunks = call.query_chunks && call.key_chunks && call.value_chunks && call.grad_chunks;
  const bool plain = chunks && !call.logits.scaled && !p.grad_weights && !call.drops;
  return plain ? backward_plain<T>(call, head_size(p), stream) : backward_options<T>(call, head_size(p), stream);
}

// Of query, key and value.
template <class T>
cudaError_t gradients(const GradCall<accumulate_t<T>>& call, cudaStream_t stream) {
  if constexpr (sizeof(T) == 2)
    if (on_tensor_cores(call.p)) return gradients_on_tensor_cores<T>(call, stream);
  return gradients_fma<T>(call, stream);
}

template <class T>
cudaError_t gradient_of_bias(const GradCall<accumulate_t<T>>& call, cudaStream_t stream) {
  if constexpr (sizeof(T) == 2)
    if (on_tensor_cores(call.p)) return bias_gradient<T>(call, head_size(call.p), stream);
  return bias_gradient_fma<T>(call, stream);
}

template <class T>
cudaError_t backward(const FusedBackward& p, cudaStream_t stream) {
  const auto call = call_of<T>(p);
  cudaError_t error = delta<T>(call, stream);
  if (error == cudaSuccess) error = gradients<T>(call, stream);
  if (error == cudaSuccess && p.grad_bias) error = gradient_of_bias<T>(call, stream);
  return error;
}

}  // namespace

int64_t backward_workspace(const FusedBackward& p) { return on_tensor_cores(p) ? GradRowTiles::count(p) : 0; }

cudaError_t fused_backward(const FusedBackward& p, cudaStream_t stream) {
  if (p.batch.count() * p.queries * p.keys == 0) return cudaSuccess;
  switch (p.dtype) {
    case DType::f64: return backward<double>(p, stream);
    case DType::f32: return backward<float>(p, stream);
    case DType::bf16: return backward<bfloat16>(p, stream);
    case DType::f16: return backward<float16>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace mha::cuda
