#pragma once
#include <cstdint>

namespace mha::ops {

uint64_t torch_target_version();      // oldest torch it runs on, as 0xMMmmpp0000000000
const char* torch_headers_version();  // torch it was compiled with

}  // namespace mha::ops
