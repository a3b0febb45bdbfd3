// Loads, stores, addresses.
#include "addresses.h"
#include "assemble.h"
#include "machine.h"
#include "statistics.h"

namespace ptxvm {

void compute_addresses(const Warp& warp, const Instruction& instruction, int operand, uint32_t lanes,
                       uint64_t* address) {
  const uint64_t base = instruction.space == Space::shared ? reinterpret_cast<uint64_t>(machine().arena.base()) : 0;
  const uint64_t add = base + uint64_t(instruction.offset);
  const uint32_t place = instruction.operand[size_t(operand)];
  if (instruction.wide_address) {
    const uint64_t* from = warp.lanes<uint64_t>(place);
    for_lanes(lanes, [&](int lane) { address[lane] = from[lane] + add; });
  } else {
    const uint32_t* from = warp.lanes<uint32_t>(place);
    for_lanes(lanes, [&](int lane) { address[lane] = from[lane] + add; });
  }
}

uint32_t observe_accesses(Warp& warp, const Instruction& instruction, const uint64_t* address, uint32_t lanes,
                          uint32_t bytes, Access kind) {
  const Machine& m = machine();
  if (instruction.space == Space::param || instruction.space == Space::constant) return lanes;
  if (m.statistics && instruction.space != Space::local) {
    if (m.arena.contains(address[__builtin_ctz(lanes)])) {
      count_shared(instruction, address, lanes, bytes);
    } else {
      count_global(instruction, address, lanes, bytes);
    }
  }
  return m.check ? check_accesses(warp, instruction, address, lanes, bytes, kind) : lanes;
}

namespace {

template <class T>
T read_memory(uint64_t address) {
  T value;
  std::memcpy(&value, reinterpret_cast<const void*>(address), sizeof value);
  return value;
}
template <class T>
void write_memory(uint64_t address, T value) {
  std::memcpy(reinterpret_cast<void*>(address), &value, sizeof value);
}

// Operands: the elements, then the address. A lane whose access is out of bounds gets the NaN pattern.
template <class T>
void load(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  uint64_t address[kLanes];
  compute_addresses(warp, instruction, instruction.count, lanes, address);
  const uint32_t bytes = uint32_t(sizeof(T)) * instruction.count;
  const uint32_t allowed = observe_accesses(warp, instruction, address, lanes, bytes, Access::read);
  for (uint32_t k = 0; k < instruction.count; ++k) {
    T* const d = warp.lanes<T>(instruction.operand[k]);
    for_lanes(allowed, [&](int lane) { d[lane] = read_memory<T>(address[lane] + k * sizeof(T)); });
    if (allowed != lanes) for_lanes(lanes & ~allowed, [&](int lane) { d[lane] = T(-1); });
  }
}

template <class T>
void store(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  uint64_t address[kLanes];
  compute_addresses(warp, instruction, instruction.count, lanes, address);
  const uint32_t bytes = uint32_t(sizeof(T)) * instruction.count;
  const uint32_t allowed = observe_accesses(warp, instruction, address, lanes, bytes, Access::write);
  for (uint32_t k = 0; k < instruction.count; ++k) {
    const T* const from = warp.lanes<T>(instruction.operand[k]);
    for_lanes(allowed, [&](int lane) { write_memory(address[lane] + k * sizeof(T), from[lane]); });
  }
}

Handler transfer(bool is_load, uint32_t bytes) {
  switch (bytes) {
    case 1: return is_load ? load<uint8_t> : store<uint8_t>;
    case 2: return is_load ? load<uint16_t> : store<uint16_t>;
    case 4: return is_load ? load<uint32_t> : store<uint32_t>;
    case 8: return is_load ? load<uint64_t> : store<uint64_t>;
    default: throw Unknown("size of the access");
  }
}

void same_address(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  uint64_t* const d = warp.lanes<uint64_t>(instruction.operand[0]);
  const uint64_t* const a = warp.lanes<uint64_t>(instruction.operand[1]);
  for_lanes(lanes, [&](int lane) { d[lane] = a[lane]; });
}

// Between offsets in shared memory and generic addresses. Elsewhere the two are the same.
template <int sign>
void shared_address(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const uint64_t base = reinterpret_cast<uint64_t>(machine().arena.base());
  uint64_t* const d = warp.lanes<uint64_t>(instruction.operand[0]);
  const uint64_t* const a = warp.lanes<uint64_t>(instruction.operand[1]);
  for_lanes(lanes, [&](int lane) { d[lane] = sign > 0 ? a[lane] + base : a[lane] - base; });
}

void is_in_shared(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const uint64_t* const a = warp.lanes<uint64_t>(instruction.operand[1]);
  uint32_t result = 0;
  for_lanes(lanes, [&](int lane) { result |= uint32_t(machine().arena.contains(a[lane])) << lane; });
  uint32_t& d = warp.predicate(instruction.operand[0]);
  d = (d & ~lanes) | result;
}

void nothing(Warp&, const Instruction&, uint32_t) {}

// Parts of `size` bytes into one register (mov.b64 %rd, {%r1, %r2}) and back.
void pack(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const uint32_t size = instruction.size, whole = size * instruction.count;
  uint8_t* const d = warp.lanes<uint8_t>(instruction.operand[0]);
  for (uint32_t k = 0; k < instruction.count; ++k) {
    const uint8_t* const part = warp.lanes<uint8_t>(instruction.operand[k + 1]);
    for_lanes(lanes, [&](int lane) {
      std::memcpy(d + uint32_t(lane) * whole + k * size, part + uint32_t(lane) * size, size);
    });
  }
}

void unpack(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const uint32_t size = instruction.size, whole = size * instruction.count;
  uint8_t copy[kLanes * sizeof(uint64_t)];  // the source may be one of the parts
  std::memcpy(copy, warp.lanes<uint8_t>(instruction.operand[0]), kLanes * whole);
  for (uint32_t k = 0; k < instruction.count; ++k) {
    uint8_t* const part = warp.lanes<uint8_t>(instruction.operand[k + 1]);
    for_lanes(lanes, [&](int lane) {
      std::memcpy(part + uint32_t(lane) * size, copy + uint32_t(lane) * whole + k * size, size);
    });
  }
}

char letter_of_bytes(uint32_t bytes) { return bytes == 1 ? 'b' : bytes == 2 ? 'h' : bytes == 4 ? 'w' : 'd'; }

bool assemble_pack(Assembler& assembler, const Statement& statement, Instruction& instruction) {
  if (statement.name() != "mov" || statement.operands.size() != 2) return false;
  const bool packs = statement.operands[1][0] == '{';
  if (!packs && statement.operands[0][0] != '{') return false;
  const auto parts = vector_elements(statement.operands[packs ? 1 : 0]);
  const uint32_t bytes = type_bytes(statement.type());
  instruction.handler = packs ? pack : unpack;
  instruction.count = uint8_t(parts.size());
  instruction.size = uint8_t(bytes / parts.size());
  const char part_type = letter_of_bytes(instruction.size), whole_type = letter_of_bytes(bytes);
  const std::string& whole = statement.operands[packs ? 0 : 1];
  instruction.operand[0] = packs ? assembler.destination(whole, whole_type) : assembler.source(whole, whole_type);
  for (size_t k = 0; k < parts.size(); ++k) {
    instruction.operand[k + 1] =
        packs ? assembler.source(parts[k], part_type) : assembler.destination(parts[k], part_type);
  }
  return true;
}

bool assemble_load_store(Assembler& assembler, const Statement& statement, Instruction& instruction) {
  const bool is_load = statement.name() == "ld" || statement.name() == "ldu";
  if ((!is_load && statement.name() != "st") || statement.has("async") || statement.has("bulk")) return false;
  const uint32_t bytes = type_bytes(statement.type());
  const char letter = letter_of_bytes(bytes);
  const char type = statement.type()[0] == 's' ? char(toupper(letter)) : letter;
  const auto elements = vector_elements(statement.operands.at(is_load ? 0 : 1));
  instruction.space = space_of(statement);
  instruction.size = uint8_t(bytes);
  instruction.count = uint8_t(elements.size());
  instruction.handler = transfer(is_load, bytes);
  if (instruction.space == Space::shared || instruction.space == Space::generic) {
    assembler.reaches_shared(uint32_t(bytes * elements.size()));
  }
  assembler.address(statement.operands.at(is_load ? 1 : 0), instruction, instruction.count);
  for (size_t k = 0; k < elements.size(); ++k) {
    instruction.operand[k] = is_load ? assembler.destination(elements[k], type) : assembler.source(elements[k], type);
  }
  return true;
}

bool assemble_address_conversion(Assembler& assembler, const Statement& statement, Instruction& instruction) {
  if (statement.name() != "cvta") return false;
  const bool shared = statement.modifiers.at(statement.has("to") ? 2 : 1).rfind("shared", 0) == 0;
  instruction.handler = !shared ? same_address : statement.has("to") ? shared_address<-1> : shared_address<1>;
  instruction.operand[1] = assembler.source(statement.operands.at(1), 'd');
  instruction.operand[0] = assembler.destination(statement.operands.at(0), 'd');
  return true;
}

}  // namespace

bool assemble_memory(Assembler& assembler, const Statement& statement, Instruction& instruction) {
  const std::string& name = statement.name();
  if (name == "prefetch" || name == "prefetchu" || name == "createpolicy" || name == "discard") {
    instruction.handler = nothing;
    return true;
  }
  if (name == "isspacep" && statement.has("shared")) {
    instruction.handler = is_in_shared;
    instruction.operand[1] = assembler.source(statement.operands.at(1), 'd');
    instruction.operand[0] = assembler.destination(statement.operands.at(0), 'p');
    return true;
  }
  return assemble_load_store(assembler, statement, instruction) || assemble_pack(assembler, statement, instruction) ||
         assemble_address_conversion(assembler, statement, instruction);
}

}  // namespace ptxvm
