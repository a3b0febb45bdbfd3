#pragma once
#include <vector>

#include "checks.h"

namespace mha::ops {

// New contiguous CPU tensor. Large ones are offered to the kernel as huge pages: touching the fresh 4 KB pages of a
// (B, H, Lq, Lk) result one by one can cost more than computing it.
Tensor allocate(const std::vector<int64_t>& shape, ScalarType type);

// New (*, heads, length, columns) with the leading dimensions, the dtype and the memory order of `like`: heads inside
// length, (*, length, heads, columns), where those of `like` are.
Tensor allocate_in_order_of(const Tensor& like, int64_t columns);

// Shape of `t` with its last `drop` dimensions replaced by `tail`.
std::vector<int64_t> shape_with_tail(const Tensor& t, int64_t drop, std::initializer_list<int64_t> tail);

}  // namespace mha::ops
