#pragma once
#include "isa.h"

namespace mha::cpu {

// Highest level that both the processor and the operating system support. Detected once.
Isa machine_isa();

}  // namespace mha::cpu
