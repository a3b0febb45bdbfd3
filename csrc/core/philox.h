// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): a random function of a counter
// and a key, without state. Dropout takes its bits from the position in the attention matrix alone, so they do not
// depend on tiling, threads, instruction set or device, and the backward regenerates them.
#pragma once
#include <cstdint>

#include "inline.h"

namespace mha {

struct PhiloxBlock {
  uint32_t word[4];
};

constexpr int kPhiloxRounds = 10;
constexpr uint32_t kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u;  // multipliers of the two lanes
constexpr uint32_t kPhiloxW0 = 0x9E3779B9u, kPhiloxW1 = 0xBB67AE85u;  // added to the key after each round

MHA_INLINE PhiloxBlock philox4x32(PhiloxBlock counter, uint32_t key0, uint32_t key1) {
  uint32_t c0 = counter.word[0], c1 = counter.word[1], c2 = counter.word[2], c3 = counter.word[3];
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = uint64_t{kPhiloxM0} * c0;
    const uint64_t p1 = uint64_t{kPhiloxM1} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(p0);
    key0 += kPhiloxW0;
    key1 += kPhiloxW1;
  }
  return {{c0, c1, c2, c3}};
}

// One block of four words serves eight neighbouring keys with 16 bits each: enough to meet any probability within
// 2^-16, and half the price of 32 bits each.
constexpr int kKeysPerBlock = 8;

// Null where there is no dropout, and then of no account.
MHA_INLINE uint64_t dropout_seed(const int64_t* seed) { return seed ? static_cast<uint64_t>(*seed) : 0; }

MHA_INLINE PhiloxBlock dropout_block(uint64_t seed, uint32_t batch, uint32_t head, uint32_t query, uint32_t key_block) {
  return philox4x32({{query, key_block, head, batch}}, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
}

// 16-bit field of key `i` (0..7) within its block: words 0..3 low halves first, then high halves.
MHA_INLINE uint32_t dropout_field(const PhiloxBlock& block, int i) {
  return i < 4 ? block.word[i] & 0xFFFFu : block.word[i - 4] >> 16;
}

// A weight is kept when its field is at or above this.
MHA_INLINE uint32_t dropout_threshold(double p) { return static_cast<uint32_t>(p * 65536.0 + 0.5); }

}  // namespace mha
