// What the files that hold the forward's kernels on tensor cores share.
#pragma once
#include "../kernels/fused_forward_block.cuh"
#include "fused_forward_launch.cuh"

namespace mha::cuda {

template <class T, int kHead, int kRowTiles, Way kWay>
cudaError_t launch_shape(ForwardCall<float> call, cudaStream_t stream) {
  using Shape = ForwardShape<T, kHead, kRowTiles, kWay>;
  static_assert(sizeof(Placement<T>) + kSharedWithoutAsking <= 48 * 1024);
  call.query_tiles = ceil_div(call.p.queries, Shape::kRows);
  const int64_t blocks = call.p.batch.count() * call.query_tiles * call.parts;
  return launch_forward(fused_forward_on_tensor_cores<T, kHead, kRowTiles, kWay>, call, blocks, 1, kThreads,
                        Shape::kSharedBytes, stream);
}

// The smallest tiles that hold heads of `size`. Options take so much longer than the products that fewer sizes do.
template <class T, int kRowTiles, Way kWay>
cudaError_t launch_head(const ForwardCall<float>& call, int64_t size, cudaStream_t stream) {
  if constexpr (kWay == Way::plain) {
    if (size <= 32) return launch_shape<T, 32, kRowTiles, kWay>(call, stream);
    if (size > 64 && size <= 96) return launch_shape<T, 96, kRowTiles, kWay>(call, stream);
  }
  if (size <= 64) return launch_shape<T, 64, kRowTiles, kWay>(call, stream);
  if (size <= 128) return launch_shape<T, 128, kRowTiles, kWay>(call, stream);
  // Output and scores of 32 queries a warp would not fit into its registers.
  return launch_shape<T, kLargestHead, 1, kWay>(call, stream);
}

// Two groups of 16 queries a warp read each key half as often from shared memory; one group makes more blocks.
template <class T>
cudaError_t forward_plain(const ForwardCall<float>& call, int64_t size, cudaStream_t stream) {
  // That keep a large GPU busy: an estimate, so that results do not depend on the machine.
  constexpr int64_t kBusyBlocks = 128;
  const int64_t large_blocks = call.p.batch.count() * ceil_div(call.p.queries, 128);
  return call.p.queries > 64 && large_blocks >= kBusyBlocks ? launch_head<T, 2, Way::plain>(call, size, stream)
                                                            : launch_head<T, 1, Way::plain>(call, size, stream);
}

template <class T>
cudaError_t forward_options(const ForwardCall<float>& call, int64_t size, cudaStream_t stream) {
  return launch_head<T, 1, Way::options>(call, size, stream);
}

template <class T>
cudaError_t forward_weights(const ForwardCall<float>& call, int64_t size, cudaStream_t stream) {
  return launch_head<T, 1, Way::weights>(call, size, stream);
}

}  // namespace mha::cuda
