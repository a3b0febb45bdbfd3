// Dropout and the normalisation of masks, on CPU.
#include "../core/half.h"
#include "../core/strides.h"
#include "allocate.h"
#include "launch.h"
#include "views.h"

namespace mha::ops {
namespace {

Tensor dropout(const Tensor& weights, const Tensor& seed, double p) {
  require_matrices("weights", weights);
  require_type("seed", seed, ScalarType::Long);
  require(seed.numel() == 1, "seed must hold one number, got shape ", shape_text(seed));
  require(p >= 0 && p <= 1, "p must lie in [0, 1], got ", p);
  Dropout problem;
  problem.dtype = dtype_of("weights", weights);
  problem.batch = batch_shape(weights, 2);
  problem.rows = weights.size(problem.batch.ndim);
  problem.cols = weights.size(problem.batch.ndim + 1);
  problem.weights = matrices<Input>("weights", weights, problem.batch, problem.rows, problem.cols);
  problem.seed = static_cast<uint64_t>(*static_cast<const int64_t*>(data_of("seed", Input{}, seed)));
  problem.p = p;
  Tensor out = allocate(shape_with_tail(weights, 0, {}), weights.scalar_type());
  problem.out = matrices<Output>("out", out, problem.batch, problem.rows, problem.cols);
  launch(cpu::kernels().dropout, problem);
  return out;
}

double mask_number(bfloat16 x) { return widen(x); }
double mask_number(float16 x) { return widen(x); }
template <class T>
double mask_number(T x) {
  return static_cast<double>(x);
}

// A mask's elements as bool, and the lowest of them.
template <class T>
double keep_elements(const Tensor& mask, const BatchShape& shape, const Tensor& keep) {
  int64_t strides[kMaxBatchDims];
  for (int d = 0; d < shape.ndim; ++d) strides[d] = mask.stride(d);
  const T* from = static_cast<const T*>(data_of("mask", Input{}, mask));
  bool* to = static_cast<bool*>(keep.mutable_data_ptr());
  double lowest = 0;
  for (int64_t i = 0, n = shape.count(); i < n; ++i) {
    const double x = mask_number(from[batch_offset(shape, i, strides)]);
    to[i] = x != 0;
    if (x < lowest) lowest = x;
  }
  return lowest;
}

double keep_elements_of(ScalarType type, const Tensor& mask, const BatchShape& shape, const Tensor& keep) {
  switch (type) {
    case ScalarType::Bool: return keep_elements<bool>(mask, shape, keep);
    case ScalarType::Byte: return keep_elements<uint8_t>(mask, shape, keep);
    case ScalarType::Char: return keep_elements<int8_t>(mask, shape, keep);
    case ScalarType::Short: return keep_elements<int16_t>(mask, shape, keep);
    case ScalarType::Int: return keep_elements<int32_t>(mask, shape, keep);
    case ScalarType::Long: return keep_elements<int64_t>(mask, shape, keep);
    case ScalarType::Double: return keep_elements<double>(mask, shape, keep);
    case ScalarType::Float: return keep_elements<float>(mask, shape, keep);
    case ScalarType::BFloat16: return keep_elements<bfloat16>(mask, shape, keep);
    case ScalarType::Half: return keep_elements<float16>(mask, shape, keep);
    default: break;
  }
  require(false, "mask must be bool, integer or real floating point, got ", dtype_name(type));
  return 0;
}

// Non-zero = may attend. A floating-point mask with a negative value is an additive one in the wrong place.
Tensor keep_mask(const Tensor& mask) {
  require(mask.dim() <= kMaxBatchDims, "mask has ", mask.dim(), " dimensions, at most ", kMaxBatchDims,
          " are possible");
  const ScalarType type = mask.scalar_type();
  Tensor keep = allocate(shape_with_tail(mask, 0, {}), ScalarType::Bool);
  const double lowest = keep_elements_of(type, mask, batch_shape(mask, 0), keep);
  require(!is_supported(type) || lowest >= 0,
          "mask must hold 0 (hidden) and non-zero (may attend), got the negative value ", lowest,
          ": pass an additive mask as bias=");
  return keep;
}

}  // namespace
}  // namespace mha::ops

STABLE_TORCH_LIBRARY_IMPL(mha_ext, CPU, m) {
  m.impl("dropout", TORCH_BOX(&mha::ops::dropout));
  m.impl("keep_mask", TORCH_BOX(&mha::ops::keep_mask));
}
