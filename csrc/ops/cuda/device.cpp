#define USE_CUDA  // torch's shim.h declares the current stream only then
#include "device.h"

#include "../shapes.h"
#include "keep_mask.h"

namespace mha::ops {

void CudaDevice::require_here(const char* name, const Tensor& t) {
  require(t.is_cuda() && t.get_device_index() == torch::stable::accelerator::getCurrentDeviceIndex(), name,
          " must be on the same CUDA device as the others");
}

Tensor CudaDevice::allocate(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides, ScalarType type) {
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(), strides.data(),
                                                  static_cast<int32_t>(type), aoti_torch_device_type_cuda(),
                                                  torch::stable::accelerator::getCurrentDeviceIndex(), &handle));
  return Tensor(handle);
}

cudaStream_t CudaDevice::stream() {
  void* current;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_get_current_cuda_stream(torch::stable::accelerator::getCurrentDeviceIndex(), &current));
  return static_cast<cudaStream_t>(current);
}

double CudaDevice::keep_mask(const Tensor& mask, const Tensor& keep) {
  check("keep_mask", cuda::keep_mask(keep_mask_problem(mask, keep), stream()));
  return 0;
}

}  // namespace mha::ops
