// Starts the kernels of the fused backward.
#include "../kernels/fused_backward_fma.cuh"
#include "../kernels/fused_bias_fma.cuh"
#include "../kernels/fused_delta.cuh"
#include "../launch.h"

namespace mha::cuda {
namespace {

// Starts `kernel` with `blocks` blocks in x, of which a grid may have 2^31 - 1.
template <class Kernel, class... Arguments>
cudaError_t start(Kernel* kernel, int64_t blocks, int threads, size_t shared, cudaStream_t stream,
                  const Arguments&... arguments) {
  constexpr size_t kSharedByDefault = 48 << 10;
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  if (shared > kSharedByDefault) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
    if (error != cudaSuccess) return error;
  }
  kernel<<<static_cast<unsigned>(blocks), threads, shared, stream>>>(arguments...);
  return cudaGetLastError();
}

template <class T>
cudaError_t backward(const FusedBackward& p, cudaStream_t stream) {
  using Acc = accumulate_t<T>;
  const GradOptions<Acc> options = GradOptions<Acc>::of(p);
  const int64_t entries = p.batch.count();
  cudaError_t error =
      start(fused_delta<T>, ceil_div(entries * p.queries, kDeltaRows), kDeltaThreads, 0, stream, p);
  if (error == cudaSuccess && (p.grad_key || p.grad_value))
    error = start(fused_key_value_fma<T>, FmaGrid::of<Acc>(p, true).blocks(entries / p.group), kFmaThreads,
                  sizeof(FmaShared<Acc>), stream, p, options);
  if (error == cudaSuccess && p.grad_query)
    error = start(fused_query_fma<T>, FmaGrid::of<Acc>(p, false).blocks(entries), kFmaThreads, sizeof(FmaShared<Acc>),
                  stream, p, options);
  if (error == cudaSuccess && p.grad_bias) {
    const BiasGrid grid = BiasGrid::of(p);
    error = start(fused_bias_fma<T>, grid.blocks(), kFmaThreads, sizeof(FmaShared<Acc>), stream, p, options, grid);
  }
  return error;
}

}  // namespace

int64_t backward_workspace(const FusedBackward&) { return 0; }

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
