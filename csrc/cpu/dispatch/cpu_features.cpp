// Compiled for the baseline: it must run on every machine.
#include "cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace mha::cpu {
namespace {

struct CpuidLeaf {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

CpuidLeaf cpuid(uint32_t leaf, uint32_t subleaf) {
  CpuidLeaf r;
  if (!__get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx)) return {};
  return r;
}

bool all(uint32_t word, uint32_t bits) { return (word & bits) == bits; }

// XCR0: which register files the operating system saves on a context switch. A processor may have AVX-512 while the
// system has it switched off.
uint64_t saved_state() {
  if (!all(cpuid(1, 0).ecx, bit_OSXSAVE)) return 0;
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t{high} << 32 | low;
}

// Linux hands out the 8 KB of tile registers only to processes that ask.
bool request_tiles() {
#if defined(__linux__)
  constexpr long kArchReqXcompPerm = 0x1023, kXfeatureXtiledata = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtiledata) == 0;
#else
  return false;
#endif
}

Isa detect() {
  constexpr uint64_t kYmm = 0x6, kZmm = 0xE6, kTiles = 0x60000;
  const uint64_t state = saved_state();
  const CpuidLeaf leaf1 = cpuid(1, 0), leaf7 = cpuid(7, 0), leaf71 = cpuid(7, 1);

  const bool avx2 = (state & kYmm) == kYmm && all(leaf7.ebx, bit_AVX2) && all(leaf1.ecx, bit_FMA | bit_F16C);
  if (!avx2) return Isa::generic;
  const bool avx512 =
      (state & kZmm) == kZmm && all(leaf7.ebx, bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL);
  if (!avx512) return Isa::avx2;
  constexpr uint32_t kAvx512Bf16 = 1u << 5;  // leaf 7.1 EAX
  if (!all(leaf71.eax, kAvx512Bf16)) return Isa::avx512;
  constexpr uint32_t kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;  // leaf 7.0 EDX
  const bool amx = (state & kTiles) == kTiles && all(leaf7.edx, kAmxBf16 | kAmxTile) && request_tiles();
  return amx ? Isa::amx_bf16 : Isa::avx512_bf16;
}

}  // namespace

Isa machine_isa() {
  static const Isa isa = detect();
  return isa;
}

}  // namespace mha::cpu

#else

namespace mha::cpu {

Isa machine_isa() { return Isa::generic; }

}  // namespace mha::cpu

#endif
