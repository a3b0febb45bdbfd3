// ldmatrix, stmatrix, movmatrix and mma: fragments of matrices spread over the lanes of a warp.
#include "addresses.h"
#include "assemble.h"
#include "machine.h"

namespace ptxvm {
namespace {

void need_all_lanes(const Instruction& instruction, uint32_t lanes) {
  if (lanes != kAllLanes) fault(instruction, "not all lanes of the warp are active");
}

// An 8 x 8 matrix of 16-bit elements: lane l holds row l / 4, columns 2 (l % 4) and the next, in one register.
// Transposed: the same lane holds column l / 4 instead.
void fragment_from_rows(const uint16_t (*rows)[8], bool transposed, uint32_t* fragment) {
  for (int lane = 0; lane < kLanes; ++lane) {
    const int across = lane / 4, along = 2 * (lane % 4);
    const uint32_t low = transposed ? rows[along][across] : rows[across][along];
    const uint32_t high = transposed ? rows[along + 1][across] : rows[across][along + 1];
    fragment[lane] = low | high << 16;
  }
}

// Lanes 8 k to 8 k + 7 hold the addresses of the rows of matrix k. Operands: the fragments, the address.
uint32_t row_addresses(Warp& warp, const Instruction& instruction, uint32_t lanes, uint64_t* address, Access kind) {
  need_all_lanes(instruction, lanes);
  const uint32_t rows = 8u * instruction.count, givers = rows == 32 ? kAllLanes : (1u << rows) - 1;
  compute_addresses(warp, instruction, instruction.count, kAllLanes, address);
  return observe_accesses(warp, instruction, address, givers, 16, kind);
}

void load_matrix(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  uint64_t address[kLanes];
  const uint32_t allowed = row_addresses(warp, instruction, lanes, address, Access::read);
  for (uint32_t k = 0; k < instruction.count; ++k) {
    uint16_t rows[8][8];
    std::memset(rows, 0xFF, sizeof rows);
    for (uint32_t row = 0; row < 8; ++row) {
      const uint32_t lane = 8 * k + row;
      if (allowed >> lane & 1) std::memcpy(rows[row], reinterpret_cast<const void*>(address[lane]), sizeof rows[row]);
    }
    fragment_from_rows(rows, instruction.mode != 0, warp.lanes<uint32_t>(instruction.operand[k]));
  }
}

void store_matrix(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  uint64_t address[kLanes];
  const uint32_t allowed = row_addresses(warp, instruction, lanes, address, Access::write);
  for (uint32_t k = 0; k < instruction.count; ++k) {
    const uint32_t* const fragment = warp.lanes<uint32_t>(instruction.operand[k]);
    uint16_t rows[8][8];
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int half = 0; half < 2; ++half) {
        const int across = lane / 4, along = 2 * (lane % 4) + half;
        (instruction.mode ? rows[along][across] : rows[across][along]) = uint16_t(fragment[lane] >> 16 * half);
      }
    }
    for (uint32_t row = 0; row < 8; ++row) {
      const uint32_t lane = 8 * k + row;
      if (allowed >> lane & 1) std::memcpy(reinterpret_cast<void*>(address[lane]), rows[row], sizeof rows[row]);
    }
  }
}

void transpose_matrix(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  need_all_lanes(instruction, lanes);
  const uint32_t* const from = warp.lanes<uint32_t>(instruction.operand[1]);
  uint16_t rows[8][8];
  for (int lane = 0; lane < kLanes; ++lane) std::memcpy(&rows[lane / 4][2 * (lane % 4)], &from[lane], sizeof(uint32_t));
  fragment_from_rows(rows, true, warp.lanes<uint32_t>(instruction.operand[0]));
}

// D = A B + C with M = 16, N = 8, summed in float, k ascending. With g = lane / 4 and t = lane % 4, and p elements of A
// and B in a register (2 of 16 bits, 1 of tf32):
//   A: register r holds row g + 8 (r % 2), columns p t + 4 p (r / 2) and on
//   B: register r holds column g, rows p t + 4 p r and on
//   C, D: register r holds row g + 8 (r / 2), column 2 t + r % 2
template <int p, int b_registers, class Convert>
void multiply(Warp& warp, const Instruction& instruction, uint32_t lanes, Convert convert) {
  need_all_lanes(instruction, lanes);
  constexpr int depth = 4 * p * b_registers;
  float a[16][depth], b[depth][8], c[16][8];
  const auto for_places = [](auto&& place) {
    for (int g = 0; g < 8; ++g) {
      for (int t = 0; t < 4; ++t) place(g, t, 4 * g + t);
    }
  };
  for (int r = 0; r < 2 * b_registers; ++r) {
    const uint32_t* const from = warp.lanes<uint32_t>(instruction.operand[size_t(4 + r)]);
    float (*const rows)[depth] = a + 8 * (r % 2);
    for_places([&](int g, int t, int lane) {
      for (int i = 0; i < p; ++i) rows[g][p * t + 4 * p * (r / 2) + i] = convert(from[lane], i);
    });
  }
  for (int r = 0; r < b_registers; ++r) {
    const uint32_t* const from = warp.lanes<uint32_t>(instruction.operand[size_t(8 + r)]);
    float (*const rows)[8] = b + 4 * p * r;
    for_places([&](int g, int t, int lane) {
      for (int i = 0; i < p; ++i) rows[p * t + i][g] = convert(from[lane], i);
    });
  }
  for (int r = 0; r < 4; ++r) {
    const float* const from = warp.lanes<float>(instruction.operand[size_t(10 + r)]);
    for_places([&](int g, int t, int lane) { c[g + 8 * (r / 2)][2 * t + r % 2] = from[lane]; });
  }
  for (int m = 0; m < 16; ++m) {
    float sum[8];  // stays in a vector register
    std::memcpy(sum, c[m], sizeof sum);
#pragma GCC unroll 16
    for (int k = 0; k < depth; ++k) {
      for (int n = 0; n < 8; ++n) sum[n] += a[m][k] * b[k][n];
    }
    std::memcpy(c[m], sum, sizeof sum);
  }
  for (int r = 0; r < 4; ++r) {
    float* const to = warp.lanes<float>(instruction.operand[size_t(r)]);
    for_places([&](int g, int t, int lane) { to[lane] = c[g + 8 * (r / 2)][2 * t + r % 2]; });
  }
}

template <int b_registers>
void multiply_half(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const auto convert = [](uint32_t pair, int i) { return half_to_float(uint16_t(pair >> 16 * i)); };
  multiply<2, b_registers>(warp, instruction, lanes, convert);
}
template <int b_registers>
void multiply_bfloat16(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const auto convert = [](uint32_t pair, int i) { return bfloat16_to_float(uint16_t(pair >> 16 * i)); };
  multiply<2, b_registers>(warp, instruction, lanes, convert);
}
// The hardware does not look at the low 13 bits of a tf32 operand.
template <int b_registers>
void multiply_tf32(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  multiply<1, b_registers>(warp, instruction, lanes,
                           [](uint32_t bits, int) { return bits_as<float>(bits & 0xFFFFE000u); });
}
template <int b_registers>
Handler choose_multiply(bool half, bool tf32) {
  return tf32 ? multiply_tf32<b_registers> : half ? multiply_half<b_registers> : multiply_bfloat16<b_registers>;
}

// mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 d, a, b, c. Places: d 0..3, a 4..7, b 8..9, c 10..13.
void assemble_multiply(Assembler& assembler, const Statement& statement, Instruction& instruction) {
  const bool half = statement.has("f16"), bfloat16 = statement.has("bf16"), tf32 = statement.has("tf32");
  const int k = statement.has("m16n8k16") ? 16 : statement.has("m16n8k8") ? 8 : statement.has("m16n8k4") ? 4 : 0;
  const bool sums_in_float = statement.type() == "f32" && statement.modifiers.size() > 4 &&
                             statement.modifiers[statement.modifiers.size() - 4] == "f32";
  const bool shape_known = tf32 ? k == 8 || k == 4 : (half || bfloat16) && k >= 8;
  if (!sums_in_float || !shape_known) throw Unknown("shape or types of the matrix product");
  const int b_registers = k / (tf32 ? 4 : 8);
  instruction.handler = b_registers == 2 ? choose_multiply<2>(half, tf32) : choose_multiply<1>(half, tf32);
  const size_t first[4] = {0, 4, 8, 10}, expected[4] = {4, size_t(2 * b_registers), size_t(b_registers), 4};
  for (size_t matrix : {1u, 2u, 3u, 0u}) {
    const auto parts = vector_elements(statement.operands.at(matrix));
    if (parts.size() != expected[matrix]) throw Unknown("number of registers");
    for (size_t r = 0; r < parts.size(); ++r) {
      instruction.operand[first[matrix] + r] =
          matrix ? assembler.source(parts[r], 'w') : assembler.destination(parts[r], 'w');
    }
  }
}

void assemble_matrix_access(Assembler& assembler, const Statement& statement, Instruction& instruction, bool is_load) {
  if (!statement.has("m8n8") || !statement.has("b16")) throw Unknown("shape of the matrices");
  const auto fragments = vector_elements(statement.operands.at(is_load ? 0 : 1));
  instruction.handler = is_load ? load_matrix : store_matrix;
  instruction.space = Space::shared;
  instruction.count = uint8_t(fragments.size());
  instruction.mode = statement.has("trans");
  for (size_t k = 0; k < fragments.size(); ++k) {
    instruction.operand[k] = is_load ? assembler.destination(fragments[k], 'w') : assembler.source(fragments[k], 'w');
  }
  assembler.address(statement.operands.at(is_load ? 1 : 0), instruction, instruction.count);
}

}  // namespace

bool assemble_matrix(Assembler& assembler, const Statement& statement, Instruction& instruction) {
  const std::string& name = statement.name();
  if (name == "ldmatrix" || name == "stmatrix") {
    assemble_matrix_access(assembler, statement, instruction, name == "ldmatrix");
  } else if (name == "movmatrix") {
    instruction.handler = transpose_matrix;
    instruction.operand[1] = assembler.source(statement.operands.at(1), 'w');
    instruction.operand[0] = assembler.destination(statement.operands.at(0), 'w');
  } else if (name == "mma") {
    assemble_multiply(assembler, statement, instruction);
  } else {
    return false;
  }
  instruction.flow = Flow::collective;
  instruction.members = assembler.literal(0xFFFFFFFFu, 'w');
  return true;
}

}  // namespace ptxvm
