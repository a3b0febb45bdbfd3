#include "../kernels/sum_over.cuh"

#include "../launch.h"
#include "steps.cuh"

namespace mha::cuda {
namespace {

template <class From, class To>
cudaError_t start(const SumCut& cut, const void* x, void* out, void* partials, cudaStream_t stream) {
  const unsigned grid = grid_for(cut.result_blocks * cut.parts);
  sum_over_kernel<<<grid, kSumThreads, 0, stream>>>(cut, static_cast<const From*>(x), static_cast<To*>(out),
                                                    static_cast<accumulate_t<To>*>(partials));
  return cudaGetLastError();
}

}  // namespace

int64_t sum_partials(const SumOver& p) {
  const SumCut cut = SumCut::of(p);
  return cut.parts > 1 ? cut.parts * cut.results : 0;
}

cudaError_t sum_over(const SumOver& p, cudaStream_t stream) {
  SumCut cut = SumCut::of(p);
  if (cut.results == 0) return cudaSuccess;
  if (!p.partials) cut.parts = 1;
  return with_dtype(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (cut.parts == 1) return start<T, T>(cut, p.x.data, p.out.data, nullptr, stream);
    const cudaError_t error = start<T, T>(cut, p.x.data, p.out.data, p.partials, stream);
    if (error != cudaSuccess) return error;
    return start<accumulate_t<T>, T>(SumCut::of_partials(cut), p.partials, p.out.data, nullptr, stream);
  });
}

}  // namespace mha::cuda
