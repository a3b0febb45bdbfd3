// Which levels share kernels: those named after bfloat16 have their own for that type alone, which is why tests of the
// other types leave these levels out.
#include "check.h"
#include "levels.h"

int main() {
  using namespace mha;
  const cpu::KernelTable* below = nullptr;
  for (const std::string& isa : cpu::supported_isas()) {
    cpu::set_isa(isa);
    const cpu::KernelTable& table = cpu::kernels();
    const bool for_bfloat16 = isa.find("bf16") != std::string::npos;
    for (int type = 0; type < kDTypes && below; ++type) {
      const bool shared = table.types[type] == below->types[type];
      const bool expected = for_bfloat16 && static_cast<DType>(type) != DType::bf16;
      CHECK(shared == expected, "%s, %s: shared %d", isa.c_str(), test::name_of(static_cast<DType>(type)), shared);
    }
    CHECK(isa == table.isa, "%s is called %s", isa.c_str(), table.isa);
    below = &table;
  }
  return test::summary("dispatch");
}
