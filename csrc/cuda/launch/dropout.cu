#include "../kernels/dropout.cuh"

#include "../launch.h"
#include "steps.cuh"

namespace mha::cuda {

cudaError_t dropout(const Dropout& p, cudaStream_t stream) {
  const DropoutCut cut = DropoutCut::of(p);
  if (cut.blocks == 0) return cudaSuccess;
  return with_dtype(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    dropout_kernel<T><<<grid_for(cut.blocks), kDropoutThreads, 0, stream>>>(p, cut);
    return cudaGetLastError();
  });
}

}  // namespace mha::cuda
