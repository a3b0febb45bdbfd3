// Argument checks. They guard memory: the operators can be called directly through torch.ops, past the Python checks
// that are worded for users. A std::invalid_argument thrown here reaches Python as ValueError, word for word; it must
// be thrown before anything is written and never inside a parallel region, where torch would swallow its text.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>

#include "../core/problem.h"
#include "stable_abi.h"

namespace mha::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

template <class... Parts>
void require(bool ok, const Parts&... parts) {
  if (ok) return;
  std::ostringstream text;
  text << "mha_ext: ";
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

inline std::string shape_text(const Tensor& t) {
  std::ostringstream text;
  text << '(';
  for (int64_t d = 0; d < t.dim(); ++d) text << (d ? ", " : "") << t.size(d);
  text << ')';
  return text.str();
}

inline bool is_supported(ScalarType type) {
  return type == ScalarType::Double || type == ScalarType::Float || type == ScalarType::BFloat16 ||
         type == ScalarType::Half;
}

inline DType dtype_of(const char* name, const Tensor& t) {
  const ScalarType type = t.scalar_type();
  require(is_supported(type), name, " must be float64, float32, bfloat16 or float16, got ScalarType ",
          static_cast<int>(type));
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

inline void require_type(const char* name, const Tensor& t, ScalarType type) {
  require(t.is_cpu(), name, " must be a CPU tensor like the others");
  require(t.scalar_type() == type, name, " must have ScalarType ", static_cast<int>(type), " like the others, got ",
          static_cast<int>(t.scalar_type()));
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
