// Chooses the kernel table for this process.
#pragma once
#include <string>
#include <vector>

#include "isa.h"
#include "kernel_table.h"

namespace mha::cpu {

// Table in use. The first call honours the environment variable MHA_EXT_ISA, which may only name a level that the
// machine has; otherwise std::invalid_argument.
const KernelTable& kernels();

// Level of that table.
Isa isa_in_use();

// Levels this machine can run, lowest first.
std::vector<std::string> supported_isas();

// Switches every later call to another level. std::invalid_argument if the machine lacks it.
void set_isa(const std::string& name);

}  // namespace mha::cpu
