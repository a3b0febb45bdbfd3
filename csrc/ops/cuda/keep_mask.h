// A mask of any dtype as a problem for the kernel.
#pragma once
#include "../views.h"

namespace mha::ops {

inline MaskKind mask_kind(ScalarType type) {
  switch (type) {
    case ScalarType::Bool:
    case ScalarType::Byte:
    case ScalarType::Char: return MaskKind::bits8;
    case ScalarType::Short:
    case ScalarType::UInt16: return MaskKind::bits16;
    case ScalarType::Int:
    case ScalarType::UInt32: return MaskKind::bits32;
    case ScalarType::Long:
    case ScalarType::UInt64: return MaskKind::bits64;
    case ScalarType::Half:
    case ScalarType::BFloat16: return MaskKind::float16;
    case ScalarType::Float: return MaskKind::float32;
    case ScalarType::Double: return MaskKind::float64;
    default: break;
  }
  refuse("mask must be bool, integer or real floating point, got ", dtype_name(type));
}

inline KeepMask keep_mask_problem(const Tensor& mask, const Tensor& keep) {
  KeepMask p;
  p.kind = mask_kind(mask.scalar_type());
  p.shape = batch_shape(mask, 0);
  for (int d = 0; d < p.shape.ndim; ++d) p.mask.batch_stride[d] = mask.stride(d);
  p.mask.data = data_of("mask", p.mask, mask);
  p.keep = static_cast<bool*>(keep.mutable_data_ptr());
  return p;
}

}  // namespace mha::ops
