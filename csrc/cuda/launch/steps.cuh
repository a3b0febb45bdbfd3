// What the launches of the steps share.
#pragma once
#include <cuda_runtime.h>

#include "../../core/half.h"
#include "../../core/problem.h"

namespace mha::cuda {

// Blocks to start for so many blocks of work: a grid has at most 2^31 - 1, and kernels loop over what is beyond.
inline unsigned grid_for(int64_t blocks) { return static_cast<unsigned>(blocks < INT32_MAX ? blocks : INT32_MAX); }

template <class T>
struct TypeOf {
  using type = T;
};

// f(TypeOf<element type>{}).
template <class F>
cudaError_t with_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f64: return f(TypeOf<double>{});
    case DType::f32: return f(TypeOf<float>{});
    case DType::bf16: return f(TypeOf<bfloat16>{});
    case DType::f16: return f(TypeOf<float16>{});
  }
  return cudaErrorInvalidValue;
}

}  // namespace mha::cuda
