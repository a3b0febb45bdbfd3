// keep = mask != 0, element by element. Whether an element is zero shows in its bits: all of them, but for the sign of
// a floating-point number.
#pragma once
#include "../../core/integers.h"
#include "elements.cuh"

namespace mha::cuda {

constexpr int kKeepThreads = 256;

// The mask with neighbouring dimensions merged where strides allow, so that few divisions find an element.
struct MaskElements {
  const void* data;
  bool* keep;
  int64_t count;
  BatchShape shape;
  int64_t stride[kMaxBatchDims];

  static MaskElements of(const KeepMask& p) {
    MaskElements mask;
    mask.data = p.mask.data;
    mask.keep = p.keep;
    mask.count = p.shape.count();
    for (int d = 0; d < p.shape.ndim; ++d) {
      const int64_t size = p.shape.size[d], stride = p.mask.batch_stride[d];
      if (size == 1) continue;
      const int last = mask.shape.ndim - 1;
      if (last >= 0 && mask.stride[last] == size * stride) {
        mask.shape.size[last] *= size;
        mask.stride[last] = stride;
      } else {
        mask.shape.size[mask.shape.ndim] = size;
        mask.stride[mask.shape.ndim++] = stride;
      }
    }
    return mask;
  }
};

// Of elements as unsigned integers of their size; `magnitude` has the bits that count.
template <class Bits>
__global__ void __launch_bounds__(kKeepThreads)
    keep_mask_kernel(const __grid_constant__ MaskElements mask, Bits magnitude) {
  const Bits* data = static_cast<const Bits*>(mask.data);
  const int64_t step = int64_t{gridDim.x} * kKeepThreads;
  for (int64_t i = int64_t{blockIdx.x} * kKeepThreads + threadIdx.x; i < mask.count; i += step)
    mask.keep[i] = (data[element_offset(mask.shape, i, mask.stride)] & magnitude) != 0;
}

}  // namespace mha::cuda
