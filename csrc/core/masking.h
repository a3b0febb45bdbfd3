// The one place that says which keys a query may see. For CPU and CUDA alike.
#pragma once
#include "inline.h"
#include "problem.h"
#include "strides.h"

namespace mha {

// Keys [begin, end) that window, causality and key length leave visible to one query.
struct KeyRange {
  int64_t begin, end;
};

// a + b and a - b that stop at the ends of int64 instead of wrapping: offsets and window sides may be any number.
MHA_INLINE int64_t saturating_add(int64_t a, int64_t b) {
  if (b > 0 && a > INT64_MAX - b) return INT64_MAX;
  if (b < 0 && a < INT64_MIN - b) return INT64_MIN;
  return a + b;
}

MHA_INLINE int64_t saturating_subtract(int64_t a, int64_t b) {
  if (b < 0 && a > INT64_MAX + b) return INT64_MAX;
  if (b > 0 && a < INT64_MIN + b) return INT64_MIN;
  return a - b;
}

MHA_INLINE int64_t clamp_index(int64_t x, int64_t n) { return x < 0 ? 0 : x > n ? n : x; }

// Farther apart than any query and key; indices and distances up to this can be added without overflow.
constexpr int64_t kFar = int64_t{1} << 61;

MHA_INLINE int64_t clamp_distance(int64_t x) { return x < -kFar ? -kFar : x > kFar ? kFar : x; }

// What of Visibility is fixed within one batch entry.
struct BatchVisibility {
  int64_t first, last;  // query i sees keys [i + first, i + last]; both lie in [-kFar, kFar]
  int64_t keys;         // keys at or past this index are hidden
  const uint8_t* mask;  // a byte other than 0 shows the key (a view of bytes as bool may hold any); null: none
  int64_t mask_row_stride, mask_col_stride;
};

MHA_INLINE BatchVisibility visibility_of(const Visibility& v, const BatchShape& batch, int64_t flat, int64_t keys) {
  BatchVisibility b;
  int64_t offset = v.causal_offset;  // query i stands at key position i + offset
  if (v.causal_offsets) offset = saturating_add(offset, *matrix<const int64_t>(batch, flat, v.causal_offsets));
  const bool left = v.window_left != INT64_MAX, right = v.window_right != INT64_MAX;
  b.first = left ? clamp_distance(saturating_subtract(offset, v.window_left)) : -kFar;
  b.last = right ? clamp_distance(saturating_add(offset, v.window_right)) : kFar;
  b.keys = v.key_lengths ? clamp_index(*matrix<const int64_t>(batch, flat, v.key_lengths), keys) : keys;
  b.mask = v.mask ? matrix<const uint8_t>(batch, flat, v.mask) : nullptr;
  b.mask_row_stride = v.mask.row_stride;
  b.mask_col_stride = v.mask.col_stride;
  return b;
}

// i + offset - left <= j <= i + offset + right, and j < keys.
MHA_INLINE KeyRange visible_keys(const BatchVisibility& v, int64_t query) {
  const int64_t begin = clamp_index(query + v.first, v.keys), end = clamp_index(query + v.last + 1, v.keys);
  return {begin, end < begin ? begin : end};
}

}  // namespace mha
