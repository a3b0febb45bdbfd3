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

// a + b that stops at the ends of int64 instead of wrapping: window sides may be INT64_MAX (unbounded).
MHA_INLINE int64_t saturating_add(int64_t a, int64_t b) {
  if (b > 0 && a > INT64_MAX - b) return INT64_MAX;
  if (b < 0 && a < INT64_MIN - b) return INT64_MIN;
  return a + b;
}

MHA_INLINE int64_t clamp_index(int64_t x, int64_t n) { return x < 0 ? 0 : x > n ? n : x; }

// What of Visibility is fixed within one batch entry.
struct BatchVisibility {
  int64_t offset;       // query i stands at key position i + offset
  int64_t keys;         // keys at or past this index are hidden
  int64_t left, right;  // window sides
  const uint8_t* mask;  // a byte other than 0 shows the key (a view of bytes as bool may hold any); null: none
  int64_t mask_row_stride, mask_col_stride;
};

MHA_INLINE BatchVisibility visibility_of(const Visibility& v, const BatchShape& batch, int64_t flat, int64_t keys) {
  BatchVisibility b;
  b.offset = v.causal_offset;
  if (v.causal_offsets) b.offset = saturating_add(b.offset, *matrix<const int64_t>(batch, flat, v.causal_offsets));
  b.keys = v.key_lengths ? clamp_index(*matrix<const int64_t>(batch, flat, v.key_lengths), keys) : keys;
  b.left = v.window_left;
  b.right = v.window_right;
  b.mask = v.mask ? matrix<const uint8_t>(batch, flat, v.mask) : nullptr;
  b.mask_row_stride = v.mask.row_stride;
  b.mask_col_stride = v.mask.col_stride;
  return b;
}

// i + offset - left <= j <= i + offset + right, and j < keys.
MHA_INLINE KeyRange visible_keys(const BatchVisibility& v, int64_t query) {
  const int64_t position = saturating_add(query, v.offset);
  int64_t begin = 0, end = v.keys;
  if (v.left != INT64_MAX) begin = clamp_index(saturating_add(position, -v.left), v.keys);
  if (v.right != INT64_MAX) end = clamp_index(saturating_add(saturating_add(position, v.right), 1), v.keys);
  return {begin, end < begin ? begin : end};
}

}  // namespace mha
