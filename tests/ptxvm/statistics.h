// How well memory accesses use the hardware, per instruction.
//
// Shared memory has 32 banks of 4 bytes. A request of 32 lanes is served in passes of 32 lanes (4 bytes or less each),
// 16 (8 bytes) or 8 (16 bytes); a pass takes as many wavefronts as the worst bank has different words. Ideal: one per
// pass. Global memory moves in sectors of 32 bytes. Ideal: the bytes asked for, divided by 32.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "program.h"

namespace ptxvm {

void count_shared(const Instruction& instruction, const uint64_t* address, uint32_t lanes, uint32_t bytes);
void count_global(const Instruction& instruction, const uint64_t* address, uint32_t lanes, uint32_t bytes);

// A JSON list with an object for each kernel, source line and opcode.
std::string statistics_json(const std::vector<const Kernel*>& kernels);

}  // namespace ptxvm
