#include "dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "../isa/tables.h"
#include "cpu_features.h"

namespace mha::cpu {
namespace {

const KernelTable& table_of(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::amx_bf16: return kernels_amx_bf16;
    case Isa::avx512_bf16: return kernels_avx512_bf16;
    case Isa::avx512: return kernels_avx512;
    case Isa::avx2: return kernels_avx2;
#endif
    default: return kernels_generic;
  }
}

const KernelTable& table_named(const std::string& name, const char* source) {
  std::string possible;
  for (int level = 0; level <= static_cast<int>(machine_isa()); ++level) {
    if (name == kIsaNames[level]) return table_of(static_cast<Isa>(level));
    possible += (level ? ", " : "") + std::string(kIsaNames[level]);
  }
  throw std::invalid_argument(std::string(source) + " must be one of the levels this machine has (" + possible +
                              "), got '" + name + "'");
}

const KernelTable* first_choice() {
  const char* cap = std::getenv("MHA_EXT_ISA");
  return cap && *cap ? &table_named(cap, "MHA_EXT_ISA") : &table_of(machine_isa());
}

std::atomic<const KernelTable*>& chosen() {
  static std::atomic<const KernelTable*> table{first_choice()};
  return table;
}

}  // namespace

const KernelTable& kernels() { return *chosen().load(std::memory_order_relaxed); }

Isa isa_in_use() {
  int level = 0;
  while (&table_of(static_cast<Isa>(level)) != &kernels()) ++level;
  return static_cast<Isa>(level);
}

std::vector<std::string> supported_isas() {
  const int last = static_cast<int>(machine_isa());
  return {kIsaNames, kIsaNames + last + 1};
}

void set_isa(const std::string& name) { chosen().store(&table_named(name, "isa"), std::memory_order_relaxed); }

}  // namespace mha::cpu
