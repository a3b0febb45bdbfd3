// Which torch this was compiled with and for. In a file of its own because pybind11, as bundled with torch 2.10 and
// 2.11, refuses to be compiled where TORCH_TARGET_VERSION is defined.
#include "torch_version.h"

#include "stable_abi.h"

namespace mha::ops {

uint64_t torch_target_version() { return TORCH_TARGET_VERSION; }

const char* torch_headers_version() { return TORCH_VERSION; }

}  // namespace mha::ops
