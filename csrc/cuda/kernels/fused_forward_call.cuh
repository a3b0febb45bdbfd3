// What the kernels of the fused forward take, and how a call is cut into blocks.
#pragma once
#include "../../core/attention.h"
#include "../../core/integers.h"
#include "../../core/masking.h"
#include "../../core/strides.h"
#include "fused_dropout.cuh"
#include "fused_logits.cuh"
#include "fused_visibility.cuh"

namespace mha::cuda {

// Passed by value. A block takes some queries of one entry and one part of the keys (and, in the general kernel, some
// columns of the output).
template <class Acc>
struct ForwardCall {
  FusedForward p;
  Logits<Acc> logits;
  Acc keep_scale;
  int64_t parts;                                               // of the keys
  int64_t query_tiles;                                         // of an entry
  int64_t first_block;                                         // of this launch
  bool query_chunks, key_chunks, value_chunks, output_chunks;  // rows lie in whole aligned chunks (fused_tiles.cuh)
};

// Keys cut into parts (launch/fused_forward.cu): each part of a row leaves its output, not yet divided by the sum, its
// statistic and its sum.
template <class Acc>
struct Partials {
  Acc* first;
  int64_t parts, queries, value_dim;

  MHA_INLINE_MEMBER Partials(const FusedForward& p, int64_t parts)
      : first(static_cast<Acc*>(p.partials)), parts(parts), queries(p.queries), value_dim(p.value_dim) {}

  MHA_INLINE_MEMBER Acc* at(int64_t entry, int64_t query, int64_t part) const {
    return first + ((entry * queries + query) * parts + part) * (value_dim + 2);
  }
};

// Which part of the work a block has. Later queries come first: with causality they see more keys, and long blocks
// should not come last. Blocks of one entry are neighbours, and find its keys in the second-level cache.
struct ForwardShare {
  int64_t entry, tile, part;

  template <class Acc>
  __device__ __forceinline__ explicit ForwardShare(const ForwardCall<Acc>& c, int64_t block) {
    part = block % c.parts;
    block /= c.parts;
    tile = c.query_tiles - 1 - block % c.query_tiles;
    entry = block / c.query_tiles;
  }
};

// Tiles [begin, end) of keys. 32 bits are enough for 2^36 keys in tiles of 32, and registers are scarce.
struct KeyTiles {
  uint32_t begin, end;

  // Those that hold keys of `range`, of which `part` of `parts` is taken.
  static __device__ __forceinline__ KeyTiles of(const KeyRange& range, int tile, int64_t part, int64_t parts) {
    if (range.begin >= range.end) return {0, 0};
    const int64_t begin = range.begin / tile, count = ceil_div(range.end, tile) - begin;
    return {static_cast<uint32_t>(begin + count * part / parts),
            static_cast<uint32_t>(begin + count * (part + 1) / parts)};
  }
};

}  // namespace mha::cuda
