// A mask of any dtype to bool, on CPU.
#include <atomic>
#include <type_traits>

#include "../../core/half.h"
#include "../../core/strides.h"
#include "../views.h"
#include "device.h"

namespace mha::ops {
namespace {

constexpr int64_t kChunk = 32768;  // elements of a task: some microseconds, an estimate

// A mask as rows of `length` elements, `stride` apart, that follow each other in the order of the result.
struct MaskRows {
  BatchShape rows;
  int64_t row_stride[kMaxBatchDims];
  int64_t length = 1, stride = 1;

  explicit MaskRows(const Tensor& mask) {
    for (int64_t d = 0; d < mask.dim(); ++d) {
      const int64_t size = mask.size(d), step = mask.stride(d);
      if (size == 1) continue;
      if (length == 1 || stride == size * step) {  // no dimension yet, or one that this continues without a gap
        length *= size;
      } else {
        row_stride[rows.ndim] = stride;
        rows.size[rows.ndim++] = length;
        length = size;
      }
      stride = step;
    }
  }
};

// An integer may be negative: it is non-zero like any other.
template <class T>
bool is_negative(T x) {
  return std::is_floating_point_v<T> && x < 0;
}
template <class T>
bool is_nonzero(T x) {
  return x != 0;
}
// Of the 16-bit formats by their bits, which compilers vectorise: sign, then a magnitude up to infinity's.
bool is_negative(bfloat16 x) { return x.bits > 0x8000u && x.bits <= 0xFF80u; }
bool is_negative(float16 x) { return x.bits > 0x8000u && x.bits <= 0xFC00u; }
bool is_nonzero(bfloat16 x) { return (x.bits & 0x7FFFu) != 0; }
bool is_nonzero(float16 x) { return (x.bits & 0x7FFFu) != 0; }

// keep[i] = from[i * stride] != 0. Returns whether any was negative.
template <class T>
MHA_INLINE bool keep_run(const T* from, int64_t stride, bool* keep, int64_t n) {
  uint8_t negative = 0;
  for (int64_t i = 0; i < n; ++i) {
    const T x = from[i * stride];
    keep[i] = is_nonzero(x);
    negative |= static_cast<uint8_t>(is_negative(x));
  }
  return negative != 0;
}

// The same for elements [begin, end) of the whole mask.
template <class T>
bool keep_range(const T* from, const MaskRows& mask, bool* keep, int64_t begin, int64_t end) {
  bool negative = false;
  for (int64_t i = begin; i < end;) {
    const int64_t row = i / mask.length, column = i % mask.length;
    const int64_t n = mask.length - column < end - i ? mask.length - column : end - i;
    const T* run = from + batch_offset(mask.rows, row, mask.row_stride) + column * mask.stride;
    negative |= mask.stride == 1 ? keep_run(run, 1, keep + i, n) : keep_run(run, mask.stride, keep + i, n);
    i += n;
  }
  return negative;
}

// For the text of an error, so its speed does not matter.
template <class T>
double lowest(const T* from, const MaskRows& mask, int64_t n) {
  double low = 0;
  if constexpr (!std::is_integral_v<T>) {
    for (int64_t i = 0; i < n; ++i) {
      const int64_t offset = batch_offset(mask.rows, i / mask.length, mask.row_stride);
      const double x = widen(from[offset + i % mask.length * mask.stride]);
      if (x < low) low = x;
    }
  }
  return low;
}

// Fills `keep`; returns the mask's lowest number where that is negative, else 0.
template <class T>
double keep_all(const Tensor& mask, const Tensor& keep) {
  const MaskRows rows(mask);
  const T* from = static_cast<const T*>(data_of("mask", Input{}, mask));
  bool* to = static_cast<bool*>(keep.mutable_data_ptr());
  std::atomic<bool> negative{false};
  torch::stable::parallel_for(0, mask.numel(), kChunk, [&](int64_t begin, int64_t end) {
    if (keep_range(from, rows, to, begin, end)) negative = true;
  });
  return negative ? lowest(from, rows, mask.numel()) : 0;
}

double keep_all_of(ScalarType type, const Tensor& mask, const Tensor& keep) {
  switch (type) {
    case ScalarType::Bool: return keep_all<uint8_t>(mask, keep);  // as bytes: any that is not 0 is true
    case ScalarType::Byte: return keep_all<uint8_t>(mask, keep);
    case ScalarType::Char: return keep_all<int8_t>(mask, keep);
    case ScalarType::Short: return keep_all<int16_t>(mask, keep);
    case ScalarType::Int: return keep_all<int32_t>(mask, keep);
    case ScalarType::Long: return keep_all<int64_t>(mask, keep);
    case ScalarType::UInt16: return keep_all<uint16_t>(mask, keep);
    case ScalarType::UInt32: return keep_all<uint32_t>(mask, keep);
    case ScalarType::UInt64: return keep_all<uint64_t>(mask, keep);
    case ScalarType::Double: return keep_all<double>(mask, keep);
    case ScalarType::Float: return keep_all<float>(mask, keep);
    case ScalarType::BFloat16: return keep_all<bfloat16>(mask, keep);
    case ScalarType::Half: return keep_all<float16>(mask, keep);
    default: break;
  }
  require(false, "mask must be bool, integer or real floating point, got ", dtype_name(type));
  return 0;
}

}  // namespace

double CpuDevice::keep_mask(const Tensor& mask, const Tensor& keep) {
  return keep_all_of(mask.scalar_type(), mask, keep);
}

}  // namespace mha::ops
