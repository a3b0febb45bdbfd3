// A kernel after assembly: instructions whose operands are places in a warp's register file.
//
// A register is an array of 32 lanes (a predicate: one 32-bit mask). Literals, addresses of variables and special
// registers are such arrays too, filled before a block starts ("presets"), so that no instruction needs to tell them
// from registers.
#pragma once
#include <array>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

namespace ptxvm {

struct Warp;
struct Instruction;

constexpr int kLanes = 32;
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;
constexpr int kMaxOperands = 20;

// Executes the instruction for those lanes whose bit is set.
using Handler = void (*)(Warp&, const Instruction&, uint32_t lanes);

enum class Flow : uint8_t { plain, branch, branch_table, exit, barrier, collective };
enum class Space : uint8_t { generic, global, shared, local, param, constant };

// What an instruction did to memory, summed over all executions; statistics.h says how it is counted.
struct Counters {
  uint64_t requests = 0, wavefronts = 0, ideal_wavefronts = 0, sectors = 0, ideal_sectors = 0;
};

struct Source {
  std::string text;     // of the instruction, as nvcc wrote it
  std::string where;    // "file.cuh:12 (inlined at kernel.cuh:34)"
  std::string problem;  // why it cannot be executed
};

struct Instruction {
  Handler handler = nullptr;
  Flow flow = Flow::plain;
  Space space = Space::generic;
  uint8_t size = 0;           // bytes of one element in memory
  uint8_t count = 1;          // elements of a vector, matrices of ldmatrix
  uint8_t mode = 0;           // chosen by the opcode for its handler
  bool wide_address = false;  // the address register has 64 bits
  bool guard_negated = false;
  int32_t guard = -1;    // register of the guard predicate
  uint32_t target = 0;   // of a branch; number of the table of a branch_table
  uint32_t members = 0;  // collective: register of the member mask
  int64_t offset = 0;    // added to the address
  int64_t immediate = 0;
  std::array<uint32_t, kMaxOperands> operand{};
  const Source* source = nullptr;
  mutable Counters counters;
};

// A lane array filled in before a block starts.
struct Preset {
  enum class Kind : uint8_t { literal, dynamic_shared, local, special };
  Kind kind;
  uint8_t size;    // bytes of an element; 0: a predicate
  uint64_t value;  // the literal; an offset from the start of dynamic shared or local memory; number of a Special
  uint32_t place;  // in the register file
};

enum Special : uint64_t {
  kTidX,
  kTidY,
  kTidZ,
  kNtidX,
  kNtidY,
  kNtidZ,
  kCtaidX,
  kCtaidY,
  kCtaidZ,
  kNctaidX,
  kNctaidY,
  kNctaidZ,
  kLaneid,
  kWarpid,
  kNwarpid,
  kLanemaskEq,
  kLanemaskLt,
  kLanemaskLe,
  kLanemaskGt,
  kLanemaskGe,
  kDynamicSmemSize,
  kTotalSmemSize,
};

struct Parameter {
  std::string name;
  uint32_t offset, size;
};

struct Kernel {
  std::string name;
  std::vector<Instruction> code;
  std::deque<Source> sources;
  std::vector<std::vector<uint32_t>> branch_tables;
  std::vector<Parameter> parameters;
  std::vector<uint64_t> parameter_memory;  // 8-byte elements: aligned as the parameters may be
  uint32_t parameter_bytes = 0;
  uint32_t register_bytes = 0;  // of the registers; the presets follow
  uint32_t file_bytes = 0;      // of both
  std::vector<Preset> presets;
  uint32_t static_shared = 0, dynamic_shared_alignment = 16, local_bytes = 0;
  uint32_t max_threads = 1024;    // __launch_bounds__
  uint32_t smallest_access = 16;  // bytes of the narrowest access that can reach shared memory
  mutable uint64_t launches = 0;  // since the last reset
};

}  // namespace ptxvm
