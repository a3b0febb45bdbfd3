#include "device.h"

#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "../../core/backward_plan.h"
#include "../../core/fused_plan.h"
#include "../../core/sum_plan.h"
#include "launch.h"

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

// Working memory of `count` elements in which `dtype` is summed up. As a tensor, so that torch's allocator has it.
Tensor working_memory(int64_t count, DType dtype) {
  return CpuDevice::allocate({count}, {1}, dtype == DType::f64 ? ScalarType::Double : ScalarType::Float);
}

// The gradients of query, key and value: the waves of backward_plan.h, one after another.
void launch_in_waves(FusedBackward& p, const BackwardPlan& plan) {
  OptionalTensor workspace;
  if (plan.workspace() > 0) {
    workspace = working_memory(plan.workspace(), p.dtype);
    p.workspace = workspace->mutable_data_ptr();
  }
  for (p.wave = 0; p.wave < plan.waves(); ++p.wave) launch_one_by_one(&cpu::TypeKernels::fused_backward, p);
}

}  // namespace

Tensor CpuDevice::allocate(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides, ScalarType type) {
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

void CpuDevice::set_zero(const Tensor& t) {
  if (t.numel() > 0) std::memset(t.mutable_data_ptr(), 0, static_cast<size_t>(t.numel() * t.element_size()));
}

void CpuDevice::product(const Product& p) { launch(&cpu::TypeKernels::product, p); }
void CpuDevice::softmax_forward(const SoftmaxForward& p) { launch(&cpu::TypeKernels::softmax_forward, p); }
void CpuDevice::softmax_backward(const SoftmaxBackward& p) { launch(&cpu::TypeKernels::softmax_backward, p); }
void CpuDevice::dropout(const Dropout& p) { launch(&cpu::TypeKernels::dropout, p); }

// A sum over much gives few tasks: it is cut into chunks, by shape alone, whose partial sums are added in order.
void CpuDevice::sum_over(SumOver& p) {
  OptionalTensor partials;
  if (const int64_t count = sum_partials(p)) {
    partials = working_memory(count, p.dtype);
    p.partials = partials->mutable_data_ptr();
  }
  launch(&cpu::TypeKernels::sum_over, p);
  if (!p.partials) return;
  const auto& second = cpu::kernels().of(p.dtype).sum_partials;
  second.run(p, 0, second.tasks(p));  // on this thread: starting the others again would cost more
}

// Where it is cut into parts of the keys (fused_plan.h), their results are merged in a second phase.
void CpuDevice::fused_forward(FusedForward& p) {
  OptionalTensor partials;
  if (const int64_t count = fused_partials(p)) {
    partials = working_memory(count, p.dtype);
    p.partials = partials->mutable_data_ptr();
  }
  launch_one_by_one(&cpu::TypeKernels::fused_forward, p);
  if (p.partials) launch(&cpu::TypeKernels::fused_merge, p);
}

void CpuDevice::fused_backward(FusedBackward& p) {
  if (p.grad_weights && !p.weights) launch_one_by_one(&cpu::TypeKernels::fused_delta_tiles, p);
  else launch(&cpu::TypeKernels::fused_delta, p);
  const BackwardPlan plan = backward_plan(p);
  if (p.grad_query || p.grad_key || p.grad_value) launch_in_waves(p, plan);
  if (p.grad_bias && !plan.has_bias) launch_one_by_one(&cpu::TypeKernels::fused_bias_backward, p);
}

}  // namespace mha::ops
