// What the dropout step and fused attention take alike.
#pragma once
#include "views.h"

namespace mha::ops {

inline uint64_t seed_of(const Tensor& seed) {
  require_type("seed", seed, ScalarType::Long);
  require(seed.numel() == 1, "seed must hold one number, got shape ", shape_text(seed));
  return static_cast<uint64_t>(*static_cast<const int64_t*>(data_of("seed", Input{}, seed)));
}

inline void require_probability(const char* name, double p) {
  require(p >= 0 && p <= 1, name, " must lie in [0, 1], got ", p);
}

}  // namespace mha::ops
