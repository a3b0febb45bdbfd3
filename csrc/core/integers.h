// Integer helpers for all code; std's are templates, whose instances are weak symbols, which kernels must not hold.
#pragma once
#include <cstdint>

#include "inline.h"

namespace mha {

MHA_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
MHA_INLINE int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
MHA_INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
MHA_INLINE int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

}  // namespace mha
