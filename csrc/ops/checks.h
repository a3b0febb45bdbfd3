// Argument checks. They guard memory: the operators can be called directly through torch.ops, past the Python checks
// that are worded for users. A std::invalid_argument thrown here reaches Python as ValueError, word for word; it must
// be thrown before anything is written and never inside a parallel region, where torch would swallow its text.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "../core/problem.h"
#include "stable_abi.h"

namespace mha::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalNumber = std::optional<double>;

template <class... Parts>
[[noreturn]] __attribute__((noinline, cold)) void refuse(const Parts&... parts) {
  std::ostringstream text;
  text << "mha_ext: ";
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

template <class... Parts>
void require(bool ok, const Parts&... parts) {
  if (!ok) refuse(parts...);
}

inline std::string shape_text(const std::vector<int64_t>& shape) {
  std::ostringstream text;
  text << '(';
  for (size_t d = 0; d < shape.size(); ++d) text << (d ? ", " : "") << shape[d];
  text << ')';
  return text.str();
}

// Becomes text only where an error needs it: checks that pass must cost nothing.
struct ShapeText {
  const Tensor& t;
};
inline ShapeText shape_text(const Tensor& t) { return {t}; }
inline std::ostream& operator<<(std::ostream& out, const ShapeText& shape) {
  std::vector<int64_t> sizes;
  for (int64_t d = 0; d < shape.t.dim(); ++d) sizes.push_back(shape.t.size(d));
  return out << shape_text(sizes);
}

// As Python spells it, without "torch.".
inline const char* dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Bool: return "bool";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::UInt16: return "uint16";
    case ScalarType::UInt32: return "uint32";
    case ScalarType::UInt64: return "uint64";
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::ComplexHalf: return "complex32";
    case ScalarType::ComplexFloat: return "complex64";
    case ScalarType::ComplexDouble: return "complex128";
    default: return torch::headeronly::toString(type);
  }
}

inline bool is_supported(ScalarType type) {
  return type == ScalarType::Double || type == ScalarType::Float || type == ScalarType::BFloat16 ||
         type == ScalarType::Half;
}

inline DType dtype_of(const char* name, const Tensor& t) {
  const ScalarType type = t.scalar_type();
  require(is_supported(type), name, " must be float64, float32, bfloat16 or float16, got ", dtype_name(type));
  switch (type) {
    case ScalarType::Double: return DType::f64;
    case ScalarType::Float: return DType::f32;
    case ScalarType::BFloat16: return DType::bf16;
    default: return DType::f16;
  }
}

// Type of per-row statistics: float64 for float64, else float32.
inline ScalarType accumulation_type(ScalarType type) {
  return type == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline void require_dims(const char* name, const Tensor& t, int64_t dims) {
  require(t.dim() == dims, name, " must have ", dims, " dimensions, got shape ", shape_text(t));
}

// A tensor of matrices: (*, heads, rows, columns).
inline void require_matrices(const char* name, const Tensor& t) {
  require(t.dim() >= 3, name, " must have shape (*, heads, rows, columns), got ", shape_text(t));
  require(t.dim() <= kMaxBatchDims, name, " has ", t.dim(), " dimensions, at most ", kMaxBatchDims, " are possible");
}

inline void require_size(const char* name, const Tensor& t, int64_t dim, int64_t size) {
  require(t.size(dim) == size, name, " must have size ", size, " in dimension ", dim, ", got shape ", shape_text(t));
}

}  // namespace mha::ops
