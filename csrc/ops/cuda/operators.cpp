// The operators on CUDA.
#include "../operators/baseline.h"
#include "device.h"

namespace mha::ops {
namespace {

using Device = CudaDevice;
#include "../operators/all.inl"

}  // namespace
}  // namespace mha::ops

STABLE_TORCH_LIBRARY_IMPL(mha_ext, CUDA, m) { mha::ops::implement_all(m); }
