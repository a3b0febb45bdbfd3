// Which pairs of a tile are visible, and which dropout keeps: one word of shared memory per query, a bit for each of
// its keys in the tile. The block works them out together.
#pragma once
#include "fused_backward_rules.cuh"
#include "fused_tiles.cuh"
#include "fused_visibility.cuh"

namespace mha::cuda {

struct PairBits {
  uint64_t seen[kGradTile], kept[kGradTile];  // of a query; bit: key
};

// This thread's share of the bits: some keys of one query.
template <int kQueries, int kKeys>
struct PairShare {
  static constexpr int kPieces = kThreads / kQueries, kBits = kKeys / kPieces;  // 8, 16 or 32 bits
  using Word = std::conditional_t<kBits == 32, uint32_t, std::conditional_t<kBits == 16, uint16_t, uint8_t>>;
  static_assert(kBits == 8 * sizeof(Word));

  int query, key;  // of the tile

  __device__ __forceinline__ PairShare()
      : query(static_cast<int>(threadIdx.x) % kQueries), key(static_cast<int>(threadIdx.x) / kQueries * kBits) {}

  __device__ __forceinline__ void store(uint64_t* words, uint32_t bits) const {
    reinterpret_cast<Word*>(words + query)[key / kBits] = static_cast<Word>(bits);
  }

  // Returns whether any of the pairs is visible.
  __device__ __forceinline__ bool see(PairBits& bits, const BatchVisibility& v, int64_t queries, int64_t first_query,
                                      int64_t first_key) const {
    const int64_t i = first_query + query, j = first_key + key;
    uint64_t seen = i < queries ? range_bits(visible_keys(v, i), j) & first_bits(kBits) : 0;
    if (v.mask && seen) seen = mask_bits<kBits>(v, i, j, seen);
    store(bits.seen, static_cast<uint32_t>(seen));
    return seen != 0;
  }

  __device__ __forceinline__ void keep(PairBits& bits, const HeadDropout& dropout, int64_t first_query,
                                       int64_t first_key) const {
    uint32_t kept = 0;
#pragma unroll 1  // two at once would take registers that are not there
    for (int i = 0; i < kBits / kKeysPerBlock; ++i)
      kept |= dropout.kept(first_query + query, (first_key + key) / kKeysPerBlock + i) << kKeysPerBlock * i;
    store(bits.kept, kept);
  }
};

}  // namespace mha::cuda
