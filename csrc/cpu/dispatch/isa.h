// Instruction-set levels, lowest first. Each level contains the ones before it.
#pragma once

namespace mha::cpu {

enum class Isa : int { generic = 0, avx2, avx512, avx512_bf16, amx_bf16 };
constexpr int kIsaLevels = 5;
constexpr const char* kIsaNames[kIsaLevels] = {"generic", "avx2", "avx512", "avx512_bf16", "amx_bf16"};

}  // namespace mha::cpu
