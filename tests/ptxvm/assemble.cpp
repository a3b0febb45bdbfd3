#include "assemble.h"

#include <cstdlib>
#include <set>

#include "machine.h"

namespace ptxvm {
namespace {

// Marks a place among the presets, whose start is known at the end only.
constexpr uint32_t kAmongPresets = 0x80000000u;

uint32_t element_bytes(char type) {
  switch (type) {
    case 'b':
    case 'B': return 1;
    case 'h':
    case 'H': return 2;
    case 'w':
    case 'W': return 4;
    case 'd':
    case 'D': return 8;
    default: return 0;
  }
}

// Lane arrays start on cache lines.
uint32_t array_bytes(char type) { return std::max(64u, kLanes * element_bytes(type)); }

const std::map<std::string, uint64_t>& specials() {
  static const std::map<std::string, uint64_t> names = {{"%tid.x", kTidX},
                                                        {"%tid.y", kTidY},
                                                        {"%tid.z", kTidZ},
                                                        {"%ntid.x", kNtidX},
                                                        {"%ntid.y", kNtidY},
                                                        {"%ntid.z", kNtidZ},
                                                        {"%ctaid.x", kCtaidX},
                                                        {"%ctaid.y", kCtaidY},
                                                        {"%ctaid.z", kCtaidZ},
                                                        {"%nctaid.x", kNctaidX},
                                                        {"%nctaid.y", kNctaidY},
                                                        {"%nctaid.z", kNctaidZ},
                                                        {"%laneid", kLaneid},
                                                        {"%warpid", kWarpid},
                                                        {"%nwarpid", kNwarpid},
                                                        {"%lanemask_eq", kLanemaskEq},
                                                        {"%lanemask_lt", kLanemaskLt},
                                                        {"%lanemask_le", kLanemaskLe},
                                                        {"%lanemask_gt", kLanemaskGt},
                                                        {"%lanemask_ge", kLanemaskGe},
                                                        {"%dynamic_smem_size", kDynamicSmemSize},
                                                        {"%total_smem_size", kTotalSmemSize}};
  return names;
}

struct Resize {
  template <class T>
  T operator()(T a) const {
    return a;
  }
};
template <class D>
Handler resize_from(char from) {
  switch (from) {
    case 'b': return elementwise<Resize, D, uint8_t>;
    case 'B': return elementwise<Resize, D, int8_t>;
    case 'h': return elementwise<Resize, D, uint16_t>;
    case 'H': return elementwise<Resize, D, int16_t>;
    case 'w': return elementwise<Resize, D, uint32_t>;
    case 'W': return elementwise<Resize, D, int32_t>;
    default: return elementwise<Resize, D, uint64_t>;
  }
}
Handler resize(char to, char from) {
  switch (element_bytes(to)) {
    case 1: return resize_from<uint8_t>(from);
    case 2: return resize_from<uint16_t>(from);
    case 4: return resize_from<uint32_t>(from);
    default: return resize_from<uint64_t>(from);
  }
}

void negate_predicate(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  uint32_t& d = warp.predicate(instruction.operand[0]);
  d = (d & ~lanes) | (~warp.predicate(instruction.operand[1]) & lanes);
}

void stop(Warp&, const Instruction& instruction, uint32_t) {
  fault(instruction, "cannot execute (" + instruction.source->problem + ")");
}

bool is_number(const std::string& text) { return isdigit(text[0]) || (text[0] == '-' && isdigit(text[1])); }

}  // namespace

const OpcodeTable& opcode_table() {
  static const OpcodeTable table = [] {
    OpcodeTable all;
    add_integer_arithmetic(all);
    add_float_arithmetic(all);
    add_logic(all);
    add_comparisons(all);
    add_integer_conversions(all);
    add_float_conversions(all);
    return all;
  }();
  return table;
}

Assembler::Assembler(Kernel& kernel) : kernel_(kernel), scopes_(1) {}

// ---- Registers, literals, addresses
// ----------------------------------------------------------------------------------

uint32_t Assembler::scratch(char type) {
  const uint32_t place = kernel_.register_bytes;
  kernel_.register_bytes += array_bytes(type);
  return place;
}

void Assembler::declare_register(const std::string& name, char type) {
  scopes_.back().registers[name] = {scratch(type), type};
}

const Assembler::Register* Assembler::find_register(const std::string& name) const {
  for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
    const auto found = scope->registers.find(name);
    if (found != scope->registers.end()) return &found->second;
  }
  return nullptr;
}

bool Assembler::is_predicate(const std::string& name) const {
  const Register* found = find_register(name);
  return found && found->type == 'p';
}

uint32_t Assembler::preset(Preset::Kind kind, uint64_t value, char type) {
  const auto key = std::make_pair(std::make_pair(int(kind), value), char(tolower(type)));
  const auto known = preset_places_.find(key);
  if (known != preset_places_.end()) return known->second;
  const uint32_t place = kAmongPresets + preset_bytes_;
  preset_bytes_ += array_bytes(type);
  kernel_.presets.push_back({kind, uint8_t(element_bytes(type)), value, place});
  return preset_places_[key] = place;
}

uint32_t Assembler::literal(uint64_t value, char type) { return preset(Preset::Kind::literal, value, type); }

uint32_t Assembler::symbol_address(const Symbol& symbol, uint64_t offset, char type) {
  const uint64_t value = symbol.value + offset;
  if (symbol.kind == Symbol::Kind::dynamic_shared) return preset(Preset::Kind::dynamic_shared, value, type);
  if (symbol.kind == Symbol::Kind::local) return preset(Preset::Kind::local, value, 'd');
  return literal(value, type);
}

void Assembler::emit_move(uint32_t to, char to_type, uint32_t from, char from_type) {
  Instruction move = current_;
  move.handler = resize(to_type, from_type);
  move.operand[0] = to;
  move.operand[1] = from;
  kernel_.code.push_back(move);
}

// An operand of another width than the opcode's type goes through a move: PTX lets registers be wider.
uint32_t Assembler::source(const std::string& text, char type) {
  if (text.empty()) throw Unknown("an operand is missing");
  if (text[0] == '!') {
    Instruction negation = current_;
    negation.handler = negate_predicate;
    negation.operand[0] = scratch('p');
    negation.operand[1] = source(text.substr(1), 'p');
    kernel_.code.push_back(negation);
    return negation.operand[0];
  }
  uint32_t place = 0;
  char own_type = type;
  const auto special = specials().find(text);
  if (const Register* known = find_register(text)) {
    place = known->place, own_type = known->type;
  } else if (special != specials().end()) {
    place = preset(Preset::Kind::special, special->second, 'w'), own_type = 'w';
  } else if (is_number(text)) {
    return literal(literal_bits(text), type);
  } else if (text == "WARP_SZ") {
    return literal(kLanes, type);
  } else {
    const size_t plus = text.find('+');
    const auto symbol = symbols_.find(trimmed(text.substr(0, plus)));
    if (symbol == symbols_.end()) throw Unknown("operand " + text);
    return symbol_address(symbol->second, plus == std::string::npos ? 0 : literal_bits(text.substr(plus + 1)), type);
  }
  if (element_bytes(own_type) == element_bytes(type)) return place;
  const uint32_t resized = scratch(type);
  emit_move(resized, type, place, own_type);
  return resized;
}

uint32_t Assembler::destination(const std::string& text, char type) {
  if (text == "_") return scratch(type);
  const Register* known = find_register(text);
  if (!known) throw Unknown("register " + text);
  if (element_bytes(known->type) == element_bytes(type)) return known->place;
  Instruction move = current_;
  move.handler = resize(known->type, type);  // a signed type extends its sign
  move.operand[0] = known->place;
  move.operand[1] = scratch(type);
  afterwards_.push_back(move);
  return move.operand[1];
}

// "[%rd1+8]", "[name+8]", "[name]", "[%r1+-4]".
void Assembler::address(const std::string& text, Instruction& instruction, int operand) {
  if (text.size() < 3 || text.front() != '[') throw Unknown("address " + text);
  std::string base = trimmed(text.substr(1, text.size() - 2));
  const size_t plus = base.find('+');
  if (plus != std::string::npos) {
    instruction.offset = int64_t(literal_bits(trimmed(base.substr(plus + 1))));
    base = trimmed(base.substr(0, plus));
  }
  const Register* known = find_register(base);
  const auto symbol = symbols_.find(base);
  if (known) {
    instruction.wide_address = known->type == 'd';
    instruction.operand[size_t(operand)] = known->place;
  } else if (symbol != symbols_.end()) {
    instruction.wide_address = true;
    instruction.operand[size_t(operand)] = symbol_address(symbol->second, 0, 'd');
  } else if (is_number(base)) {
    instruction.wide_address = true;
    instruction.operand[size_t(operand)] = literal(literal_bits(base), 'd');
  } else {
    throw Unknown("address " + text);
  }
}

void Assembler::reaches_shared(uint32_t bytes) {
  kernel_.smallest_access = std::min(kernel_.smallest_access, std::max(bytes, 1u));
}

// ---- Scopes and labels
// -----------------------------------------------------------------------------------------------

void Assembler::open_scope() { scopes_.emplace_back(); }

void Assembler::label(const std::string& name) { scopes_.back().labels[name] = uint32_t(kernel_.code.size()); }

void Assembler::branch_target(const std::string& label) {
  scopes_.back().fixups.push_back({false, kernel_.code.size(), 0, label});
}

void Assembler::branch_table(const std::string& name, const std::vector<std::string>& labels) {
  const size_t number = kernel_.branch_tables.size();
  kernel_.branch_tables.emplace_back(labels.size());
  scopes_.back().tables[name] = uint32_t(number);
  for (size_t i = 0; i < labels.size(); ++i) scopes_.back().fixups.push_back({true, number, i, labels[i]});
}

uint32_t Assembler::table_number(const std::string& name) {
  for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
    const auto found = scope->tables.find(name);
    if (found != scope->tables.end()) return found->second;
  }
  throw Unknown("branch table " + name);
}

// Branches to labels of this scope are completed, the others are left to the scope around it.
void Assembler::close_scope() {
  Scope scope = std::move(scopes_.back());
  scopes_.pop_back();
  for (const Fixup& fixup : scope.fixups) {
    const auto found = scope.labels.find(fixup.label);
    if (found == scope.labels.end()) {
      if (scopes_.empty()) throw Unknown("no label " + fixup.label + " in kernel " + kernel_.name);
      scopes_.back().fixups.push_back(fixup);
    } else if (fixup.in_table) {
      kernel_.branch_tables[fixup.instruction][fixup.entry] = found->second;
    } else {
      kernel_.code[fixup.instruction].target = found->second;
    }
  }
}

// ---- Instructions
// ----------------------------------------------------------------------------------------------------

// Modifiers that change nothing here: round to nearest is the default, and approximations are exact.
static bool is_ignored(const std::string& modifier) {
  static const std::set<std::string> ignored = {"rn", "ftz", "approx", "full"};
  return ignored.count(modifier) != 0;
}

static bool assemble_comparison(Assembler& assembler, const Statement& statement, Instruction& instruction) {
  if (statement.name() != "setp") return false;
  const auto found = opcode_table().find("setp." + statement.modifiers[1] + "." + statement.type());
  if (found == opcode_table().end()) return false;
  const std::string& types = found->second.types;
  const auto& operands = statement.operands;
  const size_t bar = operands[0].find('|');
  instruction.handler = found->second.handler;
  instruction.mode = uint8_t(statement.has("or")    ? BoolOp::either
                             : statement.has("xor") ? BoolOp::exclusive
                                                    : BoolOp::both);
  instruction.operand[2] = assembler.source(operands.at(1), types[2]);
  instruction.operand[3] = assembler.source(operands.at(2), types[3]);
  instruction.operand[4] = operands.size() > 3 ? assembler.source(operands[3], 'p') : assembler.literal(1, 'p');
  instruction.operand[0] = assembler.destination(trimmed(operands[0].substr(0, bar)), 'p');
  instruction.operand[1] = bar == std::string::npos ? assembler.scratch('p')
                                                    : assembler.destination(trimmed(operands[0].substr(bar + 1)), 'p');
  return true;
}

static bool assemble_elementwise(Assembler& assembler, const Statement& statement, Instruction& instruction) {
  std::string name = statement.name();
  for (size_t i = 1; i < statement.modifiers.size(); ++i) {
    if (!is_ignored(statement.modifiers[i])) name += "." + statement.modifiers[i];
  }
  const auto found = opcode_table().find(name);
  if (found == opcode_table().end()) return false;
  const std::string& types = found->second.types;
  if (statement.operands.size() != types.size()) throw Unknown("number of operands");
  instruction.handler = found->second.handler;
  for (size_t i = 1; i < types.size(); ++i) instruction.operand[i] = assembler.source(statement.operands[i], types[i]);
  instruction.operand[0] = assembler.destination(statement.operands[0], types[0]);
  return true;
}

void Assembler::assemble(const Statement& statement, Instruction& instruction) {
  if (!statement.guard.empty()) {
    const Register* guard = find_register(statement.guard);
    if (!guard) throw Unknown("guard " + statement.guard);
    instruction.guard = int32_t(guard->place);
    instruction.guard_negated = statement.guard_negated;
    current_ = instruction;
  }
  for (const auto group : {assemble_control, assemble_async_copy, assemble_memory, assemble_atomic, assemble_warp,
                           assemble_matrix, assemble_comparison, assemble_elementwise}) {
    if (group(*this, statement, instruction)) return;
  }
  throw Unknown("no such instruction in the interpreter");
}

void Assembler::instruction(const std::string& text, const std::string& where) {
  kernel_.sources.push_back({text, where, ""});
  Instruction instruction;
  instruction.source = &kernel_.sources.back();
  current_ = instruction;
  afterwards_.clear();
  try {
    assemble(read_statement(text), instruction);
  } catch (const std::exception& problem) {  // std::out_of_range: an operand is missing
    kernel_.sources.back().problem = problem.what();
    instruction = current_;
    instruction.handler = stop;
    afterwards_.clear();
  }
  kernel_.code.push_back(instruction);
  kernel_.code.insert(kernel_.code.end(), afterwards_.begin(), afterwards_.end());
}

void Assembler::finish() {
  instruction("exit", "end of " + kernel_.name);
  while (!scopes_.empty()) close_scope();
  const auto resolve = [&](uint32_t& place) {
    if (place & kAmongPresets) place = kernel_.register_bytes + (place & ~kAmongPresets);
  };
  for (Instruction& instruction : kernel_.code) {
    for (uint32_t& place : instruction.operand) resolve(place);
    resolve(instruction.members);
  }
  for (Preset& preset : kernel_.presets) resolve(preset.place);
  kernel_.file_bytes = kernel_.register_bytes + preset_bytes_;
}

}  // namespace ptxvm
