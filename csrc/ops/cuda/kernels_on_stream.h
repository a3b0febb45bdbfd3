// What runs on a CUDA stream: the kernels, with their working memory and with errors as exceptions.
#pragma once
#include <cuda_runtime_api.h>

#include "../../core/attention.h"
#include "../../cuda/launch.h"
#include "../checks.h"

namespace mha::ops {

// `Place` has allocate(shape, strides, type) and stream().
template <class Place>
struct KernelsOnStream {
  static constexpr bool kAveragesWeights = false;

  static void product(const Product& p) { check("product", cuda::product(p, Place::stream())); }
  static void softmax_forward(const SoftmaxForward& p) { check("softmax", cuda::softmax_forward(p, Place::stream())); }
  static void softmax_backward(const SoftmaxBackward& p) {
    check("softmax backward", cuda::softmax_backward(p, Place::stream()));
  }
  static void dropout(const Dropout& p) { check("dropout", cuda::dropout(p, Place::stream())); }
  static void sum_over(SumOver& p) {
    const OptionalTensor partials = working_memory(cuda::sum_partials(p), p.dtype, p.partials);
    check("sum", cuda::sum_over(p, Place::stream()));
  }
  static void fused_forward(FusedForward& p) {
    const OptionalTensor partials = working_memory(cuda::forward_partials(p), p.dtype, p.partials);
    check("fused attention", cuda::fused_forward(p, Place::stream()));
  }
  static void fused_backward(FusedBackward& p) {
    const OptionalTensor workspace = working_memory(cuda::backward_workspace(p), p.dtype, p.workspace);
    check("fused attention's backward", cuda::fused_backward(p, Place::stream()));
  }

  static void set_zero(const Tensor& t) {
    if (t.numel() == 0) return;
    const auto bytes = static_cast<size_t>(t.numel() * t.element_size());
    check("set to zero", cudaMemsetAsync(t.mutable_data_ptr(), 0, bytes, Place::stream()));
  }

  static void check(const char* what, cudaError_t error) {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // it is reported here, and not again by who asks next
    throw std::runtime_error(std::string("mha_ext: CUDA refused to start the kernels of ") + what + ": " +
                             cudaGetErrorString(error));
  }

 private:
  // `count` elements in which `dtype` is summed up. They may be freed while kernels that use them still run: torch's
  // allocator hands them out again on this stream only.
  static OptionalTensor working_memory(int64_t count, DType dtype, void*& data) {
    if (count == 0) return std::nullopt;
    Tensor memory = Place::allocate({count}, {1}, dtype == DType::f64 ? ScalarType::Double : ScalarType::Float);
    data = memory.mutable_data_ptr();
    return memory;
  }
};

}  // namespace mha::ops
