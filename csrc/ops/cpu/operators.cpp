// The operators on CPU.
#include "../operators/baseline.h"
#include "device.h"

namespace mha::ops {
namespace {

using Device = CpuDevice;
#include "../operators/all.inl"

}  // namespace
}  // namespace mha::ops

STABLE_TORCH_LIBRARY_IMPL(mha_ext, CPU, m) { mha::ops::implement_all(m); }
