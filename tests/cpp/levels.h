// Each level that has kernels of its own for an element type.
#pragma once
#include <string>

#include "../../csrc/cpu/dispatch/dispatch.h"

namespace test {

// f(table), with that level set.
template <class F>
void on_each_level(mha::DType dtype, const F& f) {
  const mha::cpu::TypeKernels* below = nullptr;
  for (const std::string& isa : mha::cpu::supported_isas()) {
    mha::cpu::set_isa(isa);
    const mha::cpu::KernelTable& table = mha::cpu::kernels();
    if (&table.of(dtype) != below) f(table);
    below = &table.of(dtype);
  }
}

}  // namespace test
