#include "../kernels/keep_mask.cuh"

#include "../launch.h"
#include "steps.cuh"

namespace mha::cuda {
namespace {

template <class Bits>
cudaError_t start(const MaskElements& mask, Bits magnitude, cudaStream_t stream) {
  const unsigned grid = grid_for(ceil_div(mask.count, kKeepThreads));
  keep_mask_kernel<Bits><<<grid, kKeepThreads, 0, stream>>>(mask, magnitude);
  return cudaGetLastError();
}

}  // namespace

cudaError_t keep_mask(const KeepMask& p, cudaStream_t stream) {
  const MaskElements mask = MaskElements::of(p);
  if (mask.count == 0) return cudaSuccess;
  switch (p.kind) {
    case MaskKind::bits8: return start<uint8_t>(mask, UINT8_MAX, stream);
    case MaskKind::bits16: return start<uint16_t>(mask, UINT16_MAX, stream);
    case MaskKind::bits32: return start<uint32_t>(mask, UINT32_MAX, stream);
    case MaskKind::bits64: return start<uint64_t>(mask, UINT64_MAX, stream);
    case MaskKind::float16: return start<uint16_t>(mask, INT16_MAX, stream);  // all bits but the sign
    case MaskKind::float32: return start<uint32_t>(mask, INT32_MAX, stream);
    case MaskKind::float64: return start<uint64_t>(mask, INT64_MAX, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace mha::cuda
