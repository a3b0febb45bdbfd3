#include "../kernels/softmax_backward.cuh"
#include "../kernels/softmax_forward.cuh"

#include "../launch.h"
#include "steps.cuh"

namespace mha::cuda {
namespace {

// Elements of shared memory that keep a row between the passes; 0: it has no room in the 48 KB that every device gives.
template <class T>
int room_for_row(const RowCut& cut, int64_t cols) {
  constexpr int64_t kMost = 48 * 1024 - 512;  // 512: what the kernel itself needs for its reductions
  const int64_t room = round_up(cols, int64_t{kRowRun<T>} * cut.team);
  const int64_t bytes = kRowThreads / cut.team * room * static_cast<int64_t>(sizeof(accumulate_t<T>));
  return bytes <= kMost ? static_cast<int>(room) : 0;
}

}  // namespace

cudaError_t softmax_forward(const SoftmaxForward& p, cudaStream_t stream) {
  const RowCut cut = RowCut::of(p.dtype, p.batch, p.rows, p.cols);
  if (cut.blocks == 0) return cudaSuccess;
  return with_dtype(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const int room = room_for_row<T>(cut, p.cols);
    const size_t shared = kRowThreads / cut.team * room * sizeof(accumulate_t<T>);
    softmax_forward_kernel<T><<<grid_for(cut.blocks), kRowThreads, shared, stream>>>(p, cut, room);
    return cudaGetLastError();
  });
}

cudaError_t softmax_backward(const SoftmaxBackward& p, cudaStream_t stream) {
  const RowCut cut = RowCut::of(p.dtype, p.batch, p.rows, p.cols);
  if (cut.blocks == 0) return cudaSuccess;
  return with_dtype(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    softmax_backward_kernel<T><<<grid_for(cut.blocks), kRowThreads, 0, stream>>>(p, cut);
    return cudaGetLastError();
  });
}

}  // namespace mha::cuda
