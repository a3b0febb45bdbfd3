#include "../kernels/product_fma.cuh"
#include "../kernels/product_mma.cuh"

#include "../launch.h"
#include "steps.cuh"

namespace mha::cuda {
namespace {

template <class T, bool kADepth, bool kBDepth>
cudaError_t start_mma(const Product& p, cudaStream_t stream) {
  const ProductCut cut = ProductCut::of(p, kMmaRows, kMmaCols);
  product_mma_kernel<T, kADepth, kBDepth><<<grid_for(cut.blocks), kMmaThreads, 0, stream>>>(p, cut);
  return cudaGetLastError();
}

// Scores have the depth contiguous in both factors, weighted sums in A only, those over queries in neither. Where
// nothing is contiguous either way works.
template <class T>
cudaError_t start(const Product& p, cudaStream_t stream) {
  if constexpr (sizeof(T) == 2) {
    const bool a_depth = p.a.col_stride == 1 || p.a.row_stride != 1;
    const bool b_depth = p.b.row_stride == 1 || p.b.col_stride != 1;
    if (a_depth) return b_depth ? start_mma<T, true, true>(p, stream) : start_mma<T, true, false>(p, stream);
    return b_depth ? start_mma<T, false, true>(p, stream) : start_mma<T, false, false>(p, stream);
  } else {
    const ProductCut cut = ProductCut::of(p, kFmaTile, kFmaTile);
    product_fma_kernel<T><<<grid_for(cut.blocks), kFmaThreads, 0, stream>>>(p, cut);
    return cudaGetLastError();
  }
}

}  // namespace

cudaError_t product(const Product& p, cudaStream_t stream) {
  if (p.batch.count() * p.m * p.n == 0) return cudaSuccess;
  return with_dtype(p.dtype, [&](auto type) { return start<typename decltype(type)::type>(p, stream); });
}

}  // namespace mha::cuda
