// Which keys of a tile the queries of a tile see: core/masking.h, as one bit per key.
#pragma once
#include "../../core/integers.h"
#include "../../core/masking.h"
#include "../primitives.cuh"

namespace mha::cuda {

// Bits [0, n).
MHA_DEVICE uint64_t first_bits(int64_t n) { return n <= 0 ? 0 : n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1; }

// Bit j: key first + j lies in the range.
MHA_DEVICE uint64_t range_bits(const KeyRange& range, int64_t first) {
  return first_bits(range.end - first) & ~first_bits(range.begin - first);
}

// Four bytes to four bits, 1 where the byte is not 0: byte i is moved to bit 24 + i, and no two bits meet on the way.
MHA_DEVICE uint32_t four_bits(uint32_t bytes) { return (__vminu4(bytes, 0x01010101u) * 0x01020408u) >> 24 & 0xFu; }

MHA_DEVICE uint32_t sixteen_bits(uint4 x) {
  return four_bits(x.x) | four_bits(x.y) << 4 | four_bits(x.z) << 8 | four_bits(x.w) << 12;
}

// Bit j: the mask shows key first + j to the query; `wanted` says which keys are of interest, and only those are read
// one by one. kKeys: 8, or a multiple of 16.
template <int kKeys>
MHA_DEVICE uint64_t mask_bits(const BatchVisibility& v, int64_t query, int64_t first, uint64_t wanted) {
  const uint8_t* row = v.mask + query * v.mask_row_stride + first * v.mask_col_stride;
  uint64_t bits = 0;
  constexpr int kTogether = kKeys < 16 ? kKeys : 16;
  if (v.mask_col_stride == 1 && first + kKeys <= v.keys && reinterpret_cast<uintptr_t>(row) % kTogether == 0) {
    if constexpr (kKeys == 8) {
      const uint2 x = __ldg(reinterpret_cast<const uint2*>(row));
      bits = four_bits(x.x) | four_bits(x.y) << 4;
    } else {
#pragma unroll
      for (int i = 0; i < kKeys / 16; ++i)
        bits |= uint64_t{sixteen_bits(__ldg(reinterpret_cast<const uint4*>(row) + i))} << 16 * i;
    }
    return bits & wanted;
  }
  for (uint64_t rest = wanted; rest != 0; rest &= rest - 1) {
    const int j = __ffsll(static_cast<long long>(rest)) - 1;
    if (row[j * v.mask_col_stride] != 0) bits |= uint64_t{1} << j;
  }
  return bits;
}

// Keys that some and that every query of [first, end) may see by window, causality and length: with the query both
// ends of its range only grow. Either may be empty, begin >= end.
struct TileReach {
  KeyRange some, every;

  __device__ __forceinline__ TileReach(const BatchVisibility& v, int64_t first, int64_t end) {
    const KeyRange a = visible_keys(v, first), b = visible_keys(v, end - 1);
    some = {a.begin, b.end};
    every = {b.begin, a.end};
  }
};

}  // namespace mha::cuda
