// Which tiles of the other side a tile of queries (or of keys) looks at. Tiles of which all pairs are visible are kept
// apart, because they need no mask.
#pragma once
#include "../../core/integers.h"
#include "../../core/masking.h"
#include "../primitives.cuh"

namespace mha::cuda {

// Queries and keys of a tile, save where registers or shared memory hold no more than half of those that move.
constexpr int kGradTile = 64;

// The walk takes the masked tiles [first, open_begin) and [open_end, end) first, and then the open ones between them.
struct TileWalk {
  uint32_t first, open_begin, open_end, end;

  MHA_INLINE_MEMBER uint32_t count() const { return end - first; }
  MHA_INLINE_MEMBER uint32_t masked() const { return open_begin - first + end - open_end; }
  MHA_INLINE_MEMBER int64_t tile(uint32_t step) const {
    const uint32_t before = open_begin - first;
    return step < before ? first + step : step < masked() ? open_end + step - before : open_begin + step - masked();
  }

  // Of all tiles of `tile` rows, n rows in all: those that hold part of `some`; open are those that lie in `every`.
  MHA_INLINE_MEMBER static TileWalk of(int64_t n, int tile, KeyRange some, KeyRange every) {
    const int64_t first = clamp_index(some.begin, n) / tile;
    const int64_t end = max_of(first, ceil_div(clamp_index(some.end, n), tile));
    const int64_t open_begin = min_of(end, max_of(first, ceil_div(clamp_index(every.begin, n), tile)));
    // A last tile that is not full is open if all of its rows are in.
    const int64_t last = every.end >= n ? ceil_div(n, tile) : max_of(0, every.end) / tile;
    const int64_t open_end = max_of(open_begin, min_of(end, last));
    return {static_cast<uint32_t>(first), static_cast<uint32_t>(open_begin), static_cast<uint32_t>(open_end),
            static_cast<uint32_t>(end)};
  }
};

// Key tiles of queries [begin, end), `tile` keys in each. `all`: hidden keys have weight, so none may be left out.
MHA_DEVICE TileWalk key_tiles(const BatchVisibility& v, int64_t keys, int tile, int64_t begin, int64_t end, bool all) {
  const KeyRange first = visible_keys(v, begin), last = visible_keys(v, end - 1);
  const KeyRange every = v.mask ? KeyRange{0, 0} : KeyRange{last.begin, first.end};
  TileWalk w = TileWalk::of(keys, tile, all ? KeyRange{0, keys} : KeyRange{first.begin, last.end}, every);
  // Keys behind the last one are hidden.
  if (keys % tile != 0) {
    w.open_end = static_cast<uint32_t>(min_of(w.open_end, keys / tile));
    w.open_begin = static_cast<uint32_t>(min_of(w.open_begin, w.open_end));
  }
  return w;
}

MHA_DEVICE int64_t minus(int64_t x) { return x == INT64_MIN ? INT64_MAX : -x; }

// Query tiles of keys [begin, end): of the queries i with  j - off - right <= i <= j - off + left  for a key j of them.
MHA_DEVICE TileWalk query_tiles(const BatchVisibility& v, int64_t queries, int tile, int64_t begin, int64_t end,
                                bool all) {
  const int64_t last = min_of(end, v.keys) - 1;
  const auto first_query = [&](int64_t key) {
    return v.right == INT64_MAX ? 0 : saturating_add(saturating_add(key, minus(v.offset)), minus(v.right));
  };
  const auto end_query = [&](int64_t key) {
    if (v.left == INT64_MAX) return queries;
    return saturating_add(saturating_add(saturating_add(key, minus(v.offset)), v.left), 1);
  };
  KeyRange some{0, 0}, every{0, 0};
  if (last >= begin) some = {first_query(begin), end_query(last)};
  if (!v.mask && begin + kGradTile <= v.keys) every = {first_query(last), end_query(begin)};
  return TileWalk::of(queries, tile, all ? KeyRange{0, queries} : some, every);
}

}  // namespace mha::cuda
