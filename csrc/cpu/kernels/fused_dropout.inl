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

template <class T>
struct TileDropout {
  using Acc = accumulate_t<T>;
  using Lanes = typename UnsignedLanes<Acc>::type;

  uint32_t key0, key1, head, batch;
  Lanes last_dropped;
  bool active;
  Acc keep_scale;  // of what is kept

  TileDropout() = default;
  TileDropout(const Attention& p, int64_t entry)
      : key0(static_cast<uint32_t>(p.seed)),
        key1(static_cast<uint32_t>(p.seed >> 32)),
        head(static_cast<uint32_t>(entry % p.heads)),
        batch(static_cast<uint32_t>(entry / p.heads)),
        active(dropout_threshold(p.dropout) > 0),
        keep_scale(dropout_keep_scale<Acc>(p.dropout)) {
    using Word = std::remove_reference_t<decltype(last_dropped[0])>;
    const uint64_t largest = (uint64_t{dropout_threshold(p.dropout)} << DroppedKeys<Acc>::kTop) - 1;
    last_dropped = static_cast<Word>(largest) - Lanes{};
  }

  // Keys 8 * key_block ... + 7 of the queries from `query` on.
  MHA_INLINE_MEMBER DroppedKeys<Acc> keys(int64_t query, int64_t key_block) const {
    const WordVec zero = {};
    const PhiloxVec first = block(queries_of(query, 0), key_block), second = block(queries_of(query, 1), key_block);
    DroppedKeys<Acc> keys;
    keys.last_dropped = last_dropped;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(Acc) == 8) keys.word[i] = (Lanes)first.word[i];
      else keys.word[i] = (Lanes)((first.word[i] & (0xFFFFFFFF + zero)) | second.word[i] << 32);
    }
    return keys;
  }

  // A word of 64 bits holds one query of double, two of float: `half` says which.
  MHA_INLINE_MEMBER WordVec queries_of(int64_t query, int half) const {
    constexpr int kPerWord = 8 / sizeof(Acc);
    WordVec queries = {};
    for (int i = 0; i < kWordLanes; ++i) queries[i] = static_cast<uint64_t>(query + i * kPerWord + half);
    return queries;
  }

  MHA_INLINE_MEMBER PhiloxVec block(WordVec queries, int64_t key_block) const {
    const WordVec zero = {};
    const PhiloxVec counter{{queries, static_cast<uint32_t>(key_block) + zero, head + zero, batch + zero}};
    return philox4x32(counter, key0, key1);
  }
};
