// What the memory instructions share.
#pragma once
#include <cstdint>
#include <string>

#include "assemble.h"
#include "exec.h"
#include "memory.h"

namespace ptxvm {

// Host addresses of the lanes, from the address register and the offset.
void compute_addresses(const Warp& warp, const Instruction& instruction, int operand, uint32_t lanes,
                       uint64_t* address);
// Counts and checks as asked. Returns the lanes whose access may be carried out.
uint32_t observe_accesses(Warp& warp, const Instruction& instruction, const uint64_t* address, uint32_t lanes,
                          uint32_t bytes, Access kind);

}  // namespace ptxvm
