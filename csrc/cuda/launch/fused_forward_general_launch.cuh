// The fused forward by multiply-adds, for one element type: each has a file of its own, so that they compile side by
// side.
#pragma once
#include "../kernels/fused_forward_general.cuh"
#include "fused_forward_launch.cuh"

namespace mha::cuda {

template <class T, int kPerThread, int kColumns>
cudaError_t general_shape(ForwardCall<accumulate_t<T>> call, cudaStream_t stream) {
  using Shape = GeneralShape<T, kPerThread, kColumns>;
  call.query_tiles = ceil_div(call.p.queries, Shape::kRows);
  const int64_t blocks = call.p.batch.count() * call.query_tiles * call.parts;
  const unsigned columns = static_cast<unsigned>(max_of(1, ceil_div(call.p.value_dim, kColumns)));
  return launch_forward(fused_forward_general<T, kPerThread, kColumns>, call, blocks, columns, Shape::kThreads,
                        Shape::kSharedBytes, stream);
}

template <class T>
cudaError_t forward_general(const ForwardCall<accumulate_t<T>>& call, cudaStream_t stream) {
  constexpr int kFewQueries = 16;  // as many as a block has rows of threads
  if (call.p.queries <= kFewQueries) return general_shape<T, 1, 64>(call, stream);
  if constexpr (sizeof(T) < 8)  // of double, more columns would not fit into the registers
    if (call.p.value_dim > 64) return general_shape<T, 4, 128>(call, stream);
  return general_shape<T, 4, 64>(call, stream);
}

}  // namespace mha::cuda
