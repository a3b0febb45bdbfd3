// What the fused kernels work on: panels of queries, and tiles of transposed scores, S^T[key][query]. A lane is a
// query, so the softmax of a row goes down a column: maxima, sums and rescaling need no operation across lanes.

// Keys of a block: its tile of scores (256 x 64 floats, 64 KB) and its keys and values stay in the second-level cache.
constexpr int64_t kKeyBlock = 256;
// Parts of a block begin and end at multiples of this: whole Philox blocks of keys, whole tiles of pairs.
constexpr int64_t kKeyStep = 32;

// Up to kPanelVectors vectors of neighbouring queries of one entry (query head).
struct QueryPanel {
  int64_t entry, query;  // the first lane's
  int vectors, lanes;    // lanes behind the last query of the entry are padding
};

template <class Acc>
QueryPanel query_panel(const Attention& p, int64_t entry, int64_t index) {
  const PanelSpread spread = PanelSpread::of<Acc>(p.queries);
  const int64_t first = spread.first_vector(index), end = spread.first_vector(index + 1);
  const int64_t query = first * kLanes<Acc>;
  return {entry, query, static_cast<int>(end - first), static_cast<int>(min_of(end * kLanes<Acc>, p.queries) - query)};
}

// Matrices of one entry.
template <class T>
Factor<T> rows_of(const Attention& p, int64_t entry, const Input& stack, int64_t first, int64_t count, int64_t depth) {
  const T* data = matrix<const T>(p.batch, entry, stack) + first * stack.row_stride;
  return {data, stack.row_stride, stack.col_stride, count, depth};
}
template <class T>
Factor<T> columns_of(const Attention& p, int64_t entry, const Input& stack, int64_t first, int64_t depth,
                     int64_t count) {
  const T* data = matrix<const T>(p.batch, entry, stack) + first * stack.row_stride;
  return {data, stack.col_stride, stack.row_stride, count, depth};
}

// Keys begin <= j < end of each lane.
template <class Acc>
struct LaneRange {
  VecMask<Acc> begin, end;

  MHA_INLINE_MEMBER VecMask<Acc> holds(int64_t j) const {
    const VecMask<Acc> at = VecMask<Acc>{} + static_cast<std::remove_reference_t<decltype(begin[0])>>(j);
    return (begin <= at) & (at < end);
  }
};

// Which keys the lanes of a panel can see by window, causality and length. (A mask may hide more.)
template <class Acc>
struct PanelReach {
  KeyRange lane[kPanelVectors<Acc> * kLanes<Acc>];
  KeyRange some{INT64_MAX, 0},
      every{0, INT64_MAX};  // keys that some lane, that every lane can see; `every` may be empty, begin >= end

  PanelReach() = default;
  PanelReach(const BatchVisibility& v, const QueryPanel& panel) {
    for (int i = 0; i < panel.vectors * kLanes<Acc>; ++i) {
      const KeyRange r = visible_keys(v, panel.query + min_of(i, panel.lanes - 1));
      lane[i] = r;
      every = {max_of(every.begin, r.begin), min_of(every.end, r.end)};
      if (r.begin < r.end) some = {min_of(some.begin, r.begin), max_of(some.end, r.end)};
    }
    if (some.begin > some.end) some = {0, 0};
  }

  // The ranges of vector v, counted from `key` on, as lanes.
  LaneRange<Acc> lanes_from(int64_t key, int64_t n, int v) const {
    LaneRange<Acc> range = {};
    for (int i = 0; i < kLanes<Acc>; ++i) {
      const KeyRange& r = lane[v * kLanes<Acc> + i];
      range.begin[i] = clamp_index(r.begin - key, n);
      range.end[i] = clamp_index(r.end - key, n);
    }
    return range;
  }
};

// Working memory in pieces. lay_out() calls a function that takes them all twice: the first time their sizes add up,
// the second time they are there.
struct Room {
  uintptr_t begin = 0;
  size_t used = 0;

  template <class TakeAll>
  void lay_out(TakeAll&& take_all) {
    take_all(*this);
    begin = reinterpret_cast<uintptr_t>(scratch(used));
    used = 0;
    take_all(*this);
  }

  template <class U>
  U* take(int64_t count) {
    U* piece = reinterpret_cast<U*>(begin + used);
    used += static_cast<size_t>(round_up(count * static_cast<int64_t>(sizeof(U)), kCacheLine));
    return piece;
  }
  bool there() const { return begin != 0; }
};

// A matrix [query][key] (bias or mask) read as the tile is: W neighbouring keys, one register of queries each.
template <class Acc, class Reader>
MHA_INLINE void read_transposed(Reader&& row, const QueryPanel& panel, int v, int n, Vec<Acc> (&keys)[kLanes<Acc>]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes<Acc>; ++i) keys[i] = row(panel.query + min_of(v * kLanes<Acc> + i, panel.lanes - 1), n);
  transpose(keys);
}

// rows[lane][W], of which each lane's query gets the first `size`.
template <class T, class Acc>
__attribute__((noinline)) void write_edge(const MatrixWriter<T>& output, int64_t query, int64_t d, int lanes, int size,
                                          const Acc* rows) {
  for (int i = 0; i < lanes; ++i) output.row(query + i).write(d, size, load<Acc>(rows + i * kLanes<Acc>));
}

// The reverse, for results: `size` elements of the head (1 to W) for one register of queries each, times `factor`.
// Returns whether all are finite. Every loop over `r` is unrolled: one variable index would put all of it into memory.
template <class T, class Acc = accumulate_t<T>>
MHA_INLINE bool write_transposed(const MatrixWriter<T>& output, int64_t query, int64_t d, int lanes, int size,
                                 const Acc* from, int64_t stride, Vec<Acc> factor) {
  constexpr int W = kLanes<Acc>;
  Vec<Acc> r[W], probe = {};
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) {
    r[i] = load<Acc>(from + min_of(i, size - 1) * stride) * factor;  // past the last: once more, and not written
    probe = mul_add(r[i], Vec<Acc>{}, probe);
  }
  transpose(r);
  if (size == W && output.col_stride == 1) {
    T* out = output.row(query).p + d;
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i)
      if (i < lanes) store<T>(out + i * output.row_stride, r[i]);
  } else {
    Acc rows[W * W];
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) store<Acc>(rows + i * W, r[i]);
    write_edge(output, query, d, lanes, size, rows);
  }
  return lane_sum<Acc>(probe) == 0;
}
