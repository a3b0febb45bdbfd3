// Without options but visibility.
#pragma once
#include "fused_forward_tensor_cores.cuh"

namespace mha::cuda {

// Blocks that keep a large GPU busy: an estimate, so that results do not depend on the machine.
constexpr int64_t kBusyBlocks = 128;

// Two groups of 16 queries a warp read each key half as often from shared memory; one group makes more blocks.
template <class T>
cudaError_t forward_plain(const ForwardCall<float>& call, int64_t size, cudaStream_t stream) {
  const int64_t large_blocks = call.p.batch.count() * ceil_div(call.p.queries, 128);
  return call.p.queries > 64 && large_blocks >= kBusyBlocks ? launch_head<T, 2, Way::plain>(call, size, stream)
                                                            : launch_head<T, 1, Way::plain>(call, size, stream);
}

}  // namespace mha::cuda
