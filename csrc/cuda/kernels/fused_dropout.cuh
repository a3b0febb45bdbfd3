// Dropout in the fused kernels: the bits of core/philox.h.
#pragma once
#include "../../core/attention.h"
#include "../../core/philox.h"
#include "../primitives.cuh"

namespace mha::cuda {

// The dropout of one entry (query head).
struct HeadDropout {
  uint64_t seed;
  uint32_t batch, head, threshold;

  HeadDropout() = default;
  __device__ __forceinline__ HeadDropout(const Attention& p, int64_t entry)
      : seed(dropout_seed(p.seed)),
        batch(static_cast<uint32_t>(entry / p.heads)),
        head(static_cast<uint32_t>(entry % p.heads)),
        threshold(dropout_threshold(p.dropout)) {}

  __device__ __forceinline__ bool active() const { return threshold > 0; }

  // Bit i: key 8 * key_block + i is kept.
  __device__ __forceinline__ uint32_t kept(int64_t query, int64_t key_block) const {
    const PhiloxBlock block =
        dropout_block(seed, batch, head, static_cast<uint32_t>(query), static_cast<uint32_t>(key_block));
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kKeysPerBlock; ++i) bits |= static_cast<uint32_t>(dropout_field(block, i) >= threshold) << i;
    return bits;
  }
};

// Of a row of kKeys keys (32 or 64) that four neighbouring lanes share as a tile C of mma (primitives.cuh): bit n * 8 +
// e says that the lane's element e (0, 1) of tile n is kept. Each lane draws a quarter of the blocks for all four.
template <int kKeys>
MHA_DEVICE uint64_t kept_in_quad(const HeadDropout& dropout, int64_t query, int64_t first_key) {
  const int lane = threadIdx.x % 32, t = lane % 4;
  const int64_t block = first_key / kKeysPerBlock + t;
  uint32_t mine = dropout.kept(query, block);
  if (kKeys == 64) mine |= dropout.kept(query, block + 4) << 8;
  uint64_t bits = 0;
#pragma unroll
  for (int from = 0; from < 4; ++from) {
    const uint32_t word = __shfl_sync(~0u, mine, from, 4) >> 2 * t;
    bits |= uint64_t{word & 3u} << 8 * from;
    if (kKeys == 64) bits |= uint64_t{word >> 8 & 3u} << 8 * (from + 4);
  }
  return bits;
}

// Factor of what is kept.
template <class Acc>
inline Acc scale_of_kept(const Attention& p) {
  return p.dropout < 1 ? static_cast<Acc>(1 / (1 - p.dropout)) : Acc{0};
}

}  // namespace mha::cuda
