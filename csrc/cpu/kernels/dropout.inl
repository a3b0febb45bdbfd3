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

// The rows of one matrix.
template <class Acc>
struct RowDropout {
  static constexpr int L = kLanes<Acc>;
  uint32_t key0, key1, head, batch;
  int32_t threshold;

  static RowDropout of(double p, uint64_t seed, int64_t entry, int64_t heads) {
    return {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), static_cast<uint32_t>(entry % heads),
            static_cast<uint32_t>(entry / heads), static_cast<int32_t>(dropout_threshold(p))};
  }

  // weights(j, n) is what stands at keys j .. j+n-1 of row i, write(j, n, w) takes what remains of it. Keys
  // [begin, end), where begin is a multiple of kKeysPerBlock.
  template <class Weights, class Write>
  MHA_INLINE_MEMBER void row(int64_t i, int64_t begin, int64_t end, Weights&& weights, Write&& write) const {
    alignas(kVectorBytes) uint16_t fields[kKeysPerRegister];
    WordVec key_block = {};
    for (int lane = 0; lane < kWordLanes; ++lane) key_block[lane] = static_cast<uint64_t>(begin / kKeysPerBlock + lane);
    const WordVec zero = {};
    for (int64_t j = begin; j < end; j += kKeysPerRegister, key_block += kWordLanes) {
      const PhiloxVec counter{{static_cast<uint32_t>(i) + zero, key_block, head + zero, batch + zero}};
      dropout_fields(philox4x32(counter, key0, key1), fields);
      const int64_t n = min_of(kKeysPerRegister, end - j);
      int64_t k = 0;
      for (; k + L <= n; k += L) write(j + k, L, kept(weights(j + k, L), fields + k));
      if (k < n) {
        const int rest = static_cast<int>(n - k);
        write(j + k, rest, kept(weights(j + k, rest), fields + k));
      }
    }
  }

  // A dropped weight is 0 even where it was NaN.
  MHA_INLINE_MEMBER Vec<Acc> kept(Vec<Acc> w, const uint16_t* fields) const {
    return select<Acc>(widen_integers<Acc>(fields) >= threshold, w, Vec<Acc>{});
  }
};

template <class T>
struct DropoutRows {
  using Acc = accumulate_t<T>;

  const int64_t cols;
  const MatrixReader<T> weights;
  const MatrixWriter<T> out;
  const RowDropout<Acc> dropout;
  const Acc keep_scale;

  DropoutRows(const Dropout& p, int64_t entry)
      : cols(p.cols),
        weights(p.batch, entry, p.weights),
        out(p.batch, entry, p.out),
        dropout(RowDropout<Acc>::of(p.p, dropout_seed(p.seed), entry, p.batch.size[p.batch.ndim - 1])),
        keep_scale(static_cast<Acc>(1 / (1 - p.p))) {}

  void row(int64_t i) const {
    const RowReader<T> w = weights.row(i);
    const RowWriter<T> o = out.row(i);
    dropout.row(
        i, 0, cols, [&](int64_t j, int n) { return w.read(j, n) * keep_scale; },
        [&](int64_t j, int n, Vec<Acc> v) { o.write(j, n, v); });
  }
};

template <class T>
using DropoutKernel = RowKernel<Dropout, DropoutRows<T>>;
