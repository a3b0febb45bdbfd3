#include "dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "../isa/tables.h"
#include "cpu_features.h"

namespace mha::cpu {
namespace {

constexpr KernelTable table(Isa isa, const TypeKernels (&k)[kDTypes]) {
  return {kIsaNames[static_cast<int>(isa)], {&k[0], &k[1], &k[2], &k[3]}};
}
constexpr KernelTable with_bfloat16(Isa isa, const TypeKernels& own, KernelTable below) {
  below.isa = kIsaNames[static_cast<int>(isa)];
  below.types[static_cast<int>(DType::bf16)] = &own;
  return below;
}

constexpr KernelTable kTables[] = {
    table(Isa::generic, kernels_generic),
#if defined(__x86_64__)
    table(Isa::avx2, kernels_avx2),
    table(Isa::avx512, kernels_avx512),
    with_bfloat16(Isa::avx512_bf16, kernels_avx512_bf16, table(Isa::avx512, kernels_avx512)),
    with_bfloat16(Isa::amx_bf16, kernels_amx_bf16, table(Isa::avx512, kernels_avx512)),
#endif
};

const KernelTable& table_of(Isa isa) { return kTables[static_cast<int>(isa)]; }

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

Isa isa_in_use() { return static_cast<Isa>(&kernels() - kTables); }

std::vector<std::string> supported_isas() {
  const int last = static_cast<int>(machine_isa());
  return {kIsaNames, kIsaNames + last + 1};
}

void set_isa(const std::string& name) { chosen().store(&table_named(name, "isa"), std::memory_order_relaxed); }

}  // namespace mha::cpu
