// The CPU as a place where operators run: which tensors are here, memory for results, kernels. The operators
// (operators/*.inl) are written for any device that has these functions; its twin is cuda/device.h.
#pragma once
#include "../../core/attention.h"
#include "../checks.h"

namespace mha::ops {

struct CpuDevice {
  // Whether there are kernels for the mean of the weights over the heads, and for gradients through weights not kept.
  static constexpr bool kAveragesWeights = true;

  // Lives as long as an operator works.
  struct Scope {
    explicit Scope(const Tensor&) {}
    ~Scope() {}  // not trivial, so that compilers see a use in it
  };

  static void require_here(const char* name, const Tensor& t) {
    require(t.is_cpu(), name, " must be a CPU tensor like the others");
  }

  // Large results are offered to the system as huge pages: touching the fresh 4 KB pages of a (B, H, Lq, Lk) result
  // one by one can cost more than computing it.
  static Tensor allocate(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides, ScalarType type);
  static void set_zero(const Tensor& t);  // one without gaps

  static void product(const Product& p);
  static void softmax_forward(const SoftmaxForward& p);
  static void softmax_backward(const SoftmaxBackward& p);
  static void dropout(const Dropout& p);
  static void sum_over(SumOver& p);
  static void fused_forward(FusedForward& p);
  static void fused_backward(FusedBackward& p);

  // keep = mask != 0. Returns the mask's lowest number where that is negative, else 0.
  static double keep_mask(const Tensor& mask, const Tensor& keep);
};

}  // namespace mha::ops
