#include "allocate.h"

#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace mha::ops {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;

void advise_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__)
  if (bytes < 2 * kHugePage) return;  // smaller ones need not contain a whole huge page
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (address + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (address + bytes) / kHugePage * kHugePage;
  // Advice only: whether the system follows it changes speed, nothing else, so the result is not looked at.
  if (begin < end) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size());
  int64_t stride = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= shape[d] > 1 ? shape[d] : 1;
  }
  return strides;
}

Tensor allocate(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides, ScalarType type) {
  // The shim function itself: torch::stable::empty goes through the dispatcher by name, at 0.5 us a tensor.
  AtenTensorHandle handle;
  const AOTITorchError error =
      aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(), strides.data(),
                               static_cast<int32_t>(type), aoti_torch_device_type_cpu(), 0, &handle);
  if (error != AOTI_TORCH_SUCCESS)
    throw std::runtime_error("mha_ext: no memory for a result of shape " + shape_text(shape) + " and dtype " +
                             dtype_name(type));
  Tensor t(handle);
  if (t.numel() > 0) advise_huge_pages(t.mutable_data_ptr(), t.numel() * t.element_size());
  return t;
}

}  // namespace

Tensor allocate(const std::vector<int64_t>& shape, ScalarType type) {
  return allocate(shape, contiguous_strides(shape), type);
}

Tensor allocate_in_order_of(const Tensor& like, int64_t columns) {
  std::vector<int64_t> shape = shape_with_tail(like, 1, {columns});
  const size_t head = shape.size() - 3, length = head + 1;
  const bool heads_inside =
      shape[head] > 1 && shape[length] > 1 && like.stride(head) < like.stride(length);
  if (!heads_inside) return allocate(shape, like.scalar_type());
  std::swap(shape[head], shape[length]);
  std::vector<int64_t> strides = contiguous_strides(shape);
  std::swap(shape[head], shape[length]);
  std::swap(strides[head], strides[length]);
  return allocate(shape, strides, like.scalar_type());
}

std::vector<int64_t> shape_with_tail(const Tensor& t, int64_t drop, std::initializer_list<int64_t> tail) {
  std::vector<int64_t> shape;
  shape.reserve(t.dim() - drop + tail.size());
  for (int64_t d = 0; d < t.dim() - drop; ++d) shape.push_back(t.size(d));
  shape.insert(shape.end(), tail);
  return shape;
}

}  // namespace mha::ops
