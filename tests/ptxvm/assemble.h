// From a statement of PTX to an Instruction: finds the handler and gives each operand its place in the register file.
#pragma once
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "opcodes.h"
#include "program.h"

namespace ptxvm {

// PTX that this interpreter does not know.
struct Unknown : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// One instruction as text: "@!%p1 ld.global.v2.f32 {%f1, %f2}, [%rd1+8]".
struct Statement {
  std::string text;
  std::string guard;
  bool guard_negated = false;
  std::string opcode;                  // "ld.global.v2.f32"
  std::vector<std::string> modifiers;  // "ld", "global", "v2", "f32"
  std::vector<std::string> operands;   // "{%f1, %f2}", "[%rd1+8]"

  const std::string& name() const { return modifiers.front(); }
  const std::string& type() const { return modifiers.back(); }
  bool has(const char* modifier) const;
};

// How setp combines its result with a predicate: Instruction::mode.
enum class BoolOp : uint8_t { both, either, exclusive };

struct Symbol {
  enum class Kind { shared, dynamic_shared, local, absolute };
  Kind kind;
  uint64_t value;  // offset, or address if absolute (parameters, __device__ and __constant__ variables)
};

std::string trimmed(const std::string& text);
// At commas outside of brackets.
std::vector<std::string> split_operands(const std::string& text);
// "{a, b}" -> a, b; "a" -> a.
std::vector<std::string> vector_elements(const std::string& text);
Statement read_statement(const std::string& text);
// The bits of a literal: integers, 0f3F800000 and 0d3FF0000000000000.
uint64_t literal_bits(const std::string& text);
uint32_t type_bytes(const std::string& type);  // "f32" -> 4
Space space_of(const Statement& statement);

class Assembler {
 public:
  explicit Assembler(Kernel& kernel);

  void open_scope();
  void close_scope();
  void declare_register(const std::string& name, char type);  // type: a letter of opcodes.h
  void declare_symbol(const std::string& name, Symbol symbol) { symbols_[name] = symbol; }
  void label(const std::string& name);
  void branch_table(const std::string& name, const std::vector<std::string>& labels);
  // An unknown instruction becomes one that stops with its text when it is reached.
  void instruction(const std::string& text, const std::string& where);
  void finish();

  // For the opcodes with an assembly of their own (below).
  uint32_t source(const std::string& text, char type);
  uint32_t destination(const std::string& text, char type);
  uint32_t literal(uint64_t value, char type);
  uint32_t scratch(char type);
  void address(const std::string& text, Instruction& instruction, int operand);
  bool is_predicate(const std::string& name) const;
  void branch_target(const std::string& label);
  uint32_t table_number(const std::string& name);
  void reaches_shared(uint32_t bytes);

 private:
  struct Register {
    uint32_t place;
    char type;
  };
  struct Fixup {
    bool in_table;
    size_t instruction, entry;
    std::string label;
  };
  struct Scope {
    std::map<std::string, Register> registers;
    std::map<std::string, uint32_t> labels;
    std::vector<Fixup> fixups;
    std::map<std::string, uint32_t> tables;
  };
  const Register* find_register(const std::string& name) const;
  void assemble(const Statement& statement, Instruction& instruction);
  void emit_move(uint32_t to, char to_type, uint32_t from, char from_type);
  uint32_t preset(Preset::Kind kind, uint64_t value, char type);
  uint32_t symbol_address(const Symbol& symbol, uint64_t offset, char type);

  Kernel& kernel_;
  std::vector<Scope> scopes_;
  std::map<std::string, Symbol> symbols_;
  std::map<std::pair<std::pair<int, uint64_t>, char>, uint32_t> preset_places_;
  uint32_t preset_bytes_ = 0;
  Instruction current_;                  // guard and source of the statement at hand, for the moves it needs
  std::vector<Instruction> afterwards_;  // moves that follow it
};

// Each fills in an instruction of its group and returns true, or returns false if the opcode is not of the group.
bool assemble_control(Assembler& assembler, const Statement& statement, Instruction& instruction);
bool assemble_memory(Assembler& assembler, const Statement& statement, Instruction& instruction);
bool assemble_async_copy(Assembler& assembler, const Statement& statement, Instruction& instruction);
bool assemble_warp(Assembler& assembler, const Statement& statement, Instruction& instruction);
bool assemble_matrix(Assembler& assembler, const Statement& statement, Instruction& instruction);
bool assemble_atomic(Assembler& assembler, const Statement& statement, Instruction& instruction);

}  // namespace ptxvm
