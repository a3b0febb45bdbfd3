// Dropout on a tile of the fused kernels: the bits of core/philox.h with queries in the lanes. One Philox block of a
// query serves eight neighbouring keys.

template <class Acc>
struct UnsignedLanes;
template <>
struct UnsignedLanes<float> {
  typedef uint32_t type __attribute__((vector_size(kVectorBytes)));
};
template <>
struct UnsignedLanes<double> {
  typedef uint64_t type __attribute__((vector_size(kVectorBytes)));
};

// What is known of eight keys of one vector of queries.
template <class Acc>
struct DroppedKeys {
  using Lanes = typename UnsignedLanes<Acc>::type;
  static constexpr int kTop = 8 * sizeof(Acc) - 16;  // where a field stands when it is compared

  Lanes word[4];
  Lanes last_dropped;  // the largest field that drops, followed by ones

  // w where key n (0..7) is kept, 0 elsewhere: also where w is NaN.
  MHA_INLINE_MEMBER Vec<Acc> apply(Vec<Acc> w, int n) const {
    const Lanes field = n < 4 ? word[n] << kTop : word[n - 4] << (kTop - 16);
    return select<Acc>((VecMask<Acc>)(field > last_dropped), w, Vec<Acc>{});
  }
};

// What the first two rounds of Philox make of a query. They see the counter's (query, key block, head, batch) apart:
// with p0 = M0 query, p1 = M1 head and key k, round 1 gives
//   (hi p1 ^ key block ^ k0, lo p1, hi p0 ^ batch ^ k1, lo p0)
// and round 2 multiplies the first and the third of these. So a panel does both rounds for its queries once, and for
// each key block only what depends on it, which is one number for all lanes.
struct PhiloxQueries {
  WordVec first, second, third;  // third: not yet mixed with the key block
};

template <class T>
struct PanelDropout {
  using Acc = accumulate_t<T>;
  using Lanes = typename UnsignedLanes<Acc>::type;
  static constexpr int kHalves = 8 / sizeof(Acc);  // queries of float that stand side by side in a lane of 64 bits

  bool active;
  Acc keep_scale;  // of what is kept
  Lanes last_dropped;
  uint32_t key0, key1, head;
  PhiloxQueries queries[kPanelVectors<Acc>][kHalves];

  PanelDropout() = default;
  PanelDropout(const Attention& p, const QueryPanel& panel)
      : active(dropout_threshold(p.dropout) > 0),
        keep_scale(scale_of_kept(p)),
        key0(static_cast<uint32_t>(dropout_seed(p.seed))),
        key1(static_cast<uint32_t>(dropout_seed(p.seed) >> 32)),
        head(static_cast<uint32_t>(panel.entry % p.heads)) {
    using Word = std::remove_reference_t<decltype(last_dropped[0])>;
    const uint64_t largest = (uint64_t{dropout_threshold(p.dropout)} << DroppedKeys<Acc>::kTop) - 1;
    last_dropped = static_cast<Word>(largest) - Lanes{};
    if (!active) return;
    const uint32_t batch = static_cast<uint32_t>(panel.entry / p.heads);
    for (int v = 0; v < panel.vectors; ++v)
      for (int half = 0; half < kHalves; ++half) {
        WordVec query = {};
        for (int i = 0; i < kWordLanes; ++i)
          query[i] = static_cast<uint32_t>(panel.query + v * kLanes<Acc> + i * kHalves + half);
        const WordVec p0 = multiply_low_words(query, kPhiloxM0 - WordVec{});
        const WordVec p1 = multiply_low_words((p0 >> 32) ^ (batch ^ key1), kPhiloxM1 - WordVec{});
        const uint32_t low_head = kPhiloxM1 * head;
        queries[v][half] = {(p1 >> 32) ^ (low_head ^ (key0 + kPhiloxW0)), p1, p0};
      }
  }

  static Acc scale_of_kept(const Attention& p) {
    return p.dropout < 1 ? static_cast<Acc>(1 / (1 - p.dropout)) : Acc{0};
  }

  // Keys 8 * key_block ... + 7 of the queries of vector v.
  MHA_INLINE_MEMBER DroppedKeys<Acc> keys(int v, int64_t key_block) const {
    const uint32_t high_head = static_cast<uint32_t>(uint64_t{kPhiloxM1} * head >> 32);
    const uint64_t p0 = uint64_t{kPhiloxM0} * (high_head ^ static_cast<uint32_t>(key_block) ^ key0);
    PhiloxVec half[kHalves];
#pragma GCC unroll 2
    for (int h = 0; h < kHalves; ++h) {
      const PhiloxQueries& q = queries[v][h];
      const uint32_t mixed = static_cast<uint32_t>(p0 >> 32) ^ (key1 + kPhiloxW1);
      const PhiloxVec state{{q.first, q.second, q.third ^ mixed, static_cast<uint32_t>(p0) - WordVec{}}};
      half[h] = philox4x32<kPhiloxRounds - 2>(state, key0 + 2 * kPhiloxW0, key1 + 2 * kPhiloxW1);
    }
    DroppedKeys<Acc> keys;
    keys.last_dropped = last_dropped;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      if constexpr (kHalves == 1) keys.word[i] = (Lanes)half[0].word[i];
      else keys.word[i] = (Lanes)((half[0].word[i] & (0xFFFFFFFF - WordVec{})) | half[1].word[i] << 32);
    }
    return keys;
  }
};
