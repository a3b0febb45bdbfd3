// out = weights * keep / (1 - p), keep from the position alone (core/philox.h). One lane computes one Philox block, so
// a register serves kWordLanes * 8 neighbouring keys.

constexpr int kWordLanes = kVectorBytes / 8;
constexpr int kKeysPerRegister = kWordLanes * kKeysPerBlock;

struct PhiloxVec {
  WordVec word[4];  // 32-bit words in the low halves of the lanes; what stands in the high halves is of no account
};

// Rounds of philox4x32 of core/philox.h, lane by lane.
template <int kRounds = kPhiloxRounds>
MHA_INLINE PhiloxVec philox4x32(PhiloxVec counter, uint32_t key0, uint32_t key1) {
  WordVec c0 = counter.word[0], c1 = counter.word[1], c2 = counter.word[2], c3 = counter.word[3];
  const WordVec m0 = kPhiloxM0 - WordVec{}, m1 = kPhiloxM1 - WordVec{};
#pragma GCC unroll 10
  for (int round = 0; round < kRounds; ++round) {
    const WordVec p0 = multiply_low_words(c0, m0), p1 = multiply_low_words(c2, m1);
    c0 = (p1 >> 32) ^ c1 ^ key0;
    c1 = p1;
    c2 = (p0 >> 32) ^ c3 ^ key1;
    c3 = p0;
    key0 += kPhiloxW0;
    key1 += kPhiloxW1;
  }
  return {{c0, c1, c2, c3}};
}

// The 16-bit fields of the keys in order: those of words 0..3 by their low halves, then by their high halves.
MHA_INLINE void dropout_fields(const PhiloxVec& block, uint16_t* fields) {
  const WordVec low = 0xFFFF - WordVec{}, high = 0xFFFF0000 - WordVec{};
  const WordVec* c = block.word;
  const WordVec first = (c[0] & low) | (c[1] & low) << 16 | (c[2] & low) << 32 | c[3] << 48;
  const WordVec second = (c[0] & high) >> 16 | (c[1] & high) | (c[2] & high) << 16 | (c[3] & high) << 32;
  uint64_t quads[2 * kWordLanes];
  for (int lane = 0; lane < kWordLanes; ++lane) {
    quads[2 * lane] = first[lane];
    quads[2 * lane + 1] = second[lane];
  }
  std::memcpy(fields, quads, sizeof quads);
}

template <class T>
struct DropoutRows {
  using Acc = accumulate_t<T>;
  static constexpr int L = kLanes<Acc>;

  const int64_t cols;
  const MatrixReader<T> weights;
  const MatrixWriter<T> out;
  const uint32_t key0, key1, head, batch;
  const int32_t threshold;
  const Acc keep_scale;

  DropoutRows(const Dropout& p, int64_t entry)
      : cols(p.cols),
        weights(p.batch, entry, p.weights),
        out(p.batch, entry, p.out),
        key0(static_cast<uint32_t>(p.seed)),
        key1(static_cast<uint32_t>(p.seed >> 32)),
        head(static_cast<uint32_t>(entry % p.batch.size[p.batch.ndim - 1])),
        batch(static_cast<uint32_t>(entry / p.batch.size[p.batch.ndim - 1])),
        threshold(static_cast<int32_t>(dropout_threshold(p.p))),
        keep_scale(static_cast<Acc>(1 / (1 - p.p))) {}

  void row(int64_t i) const {
    const RowReader<T> w = weights.row(i);
    const RowWriter<T> o = out.row(i);
    alignas(kVectorBytes) uint16_t fields[kKeysPerRegister];
    WordVec key_block = {};
    for (int lane = 0; lane < kWordLanes; ++lane) key_block[lane] = lane;
    const WordVec zero = {};
    for (int64_t j = 0; j < cols; j += kKeysPerRegister, key_block += kWordLanes) {
      const PhiloxVec counter{{static_cast<uint32_t>(i) + zero, key_block, head + zero, batch + zero}};
      dropout_fields(philox4x32(counter, key0, key1), fields);
      const int64_t n = min_of(kKeysPerRegister, cols - j);
      int64_t k = 0;
      for (; k + L <= n; k += L) o.write(j + k, L, dropped(w.read(j + k, L), fields + k));
      if (k < n) {
        const int rest = static_cast<int>(n - k);
        o.write(j + k, rest, dropped(w.read(j + k, rest), fields + k));
      }
    }
  }

  // A dropped weight is 0 even where it was NaN.
  MHA_INLINE_MEMBER Vec<Acc> dropped(Vec<Acc> w, const uint16_t* fields) const {
    return select<Acc>(widen_integers<Acc>(fields) >= threshold, w * keep_scale, Vec<Acc>{});
  }
};

template <class T>
using DropoutKernel = RowKernel<Dropout, DropoutRows<T>>;
