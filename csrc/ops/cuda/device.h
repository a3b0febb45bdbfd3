// A CUDA device as a place where operators run, as cpu/device.h is the CPU: the device of the first tensor, and torch's
// current stream there.
#pragma once
#include "kernels_on_stream.h"

#include <torch/csrc/stable/accelerator.h>

namespace mha::ops {

struct CudaDevice : KernelsOnStream<CudaDevice> {
  // Makes the tensor's device the current one while an operator works.
  class Scope {
   public:
    explicit Scope(const Tensor& t) : guard(index_of(t)) {}

   private:
    static int32_t index_of(const Tensor& t) {
      require(t.is_cuda(), "the first tensor must be on a CUDA device like the others");
      return t.get_device_index();
    }
    torch::stable::accelerator::DeviceGuard guard;
  };

  static void require_here(const char* name, const Tensor& t);
  static Tensor allocate(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides, ScalarType type);
  static cudaStream_t stream();

  // keep = mask != 0. Always returns 0: to look for negative numbers would mean to wait for the device.
  static double keep_mask(const Tensor& mask, const Tensor& keep);
};

}  // namespace mha::ops
