// Control flow and barriers: Block::run_group executes them by their Flow.
#include "assemble.h"
#include "machine.h"

namespace ptxvm {
namespace {

void trap(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  fault(instruction, "trap by thread " + std::to_string(warp.thread(__builtin_ctz(lanes))));
}

void nothing(Warp&, const Instruction&, uint32_t) {}

// bar.sync a{, b}, bar.arrive a, b, bar.red.op.type d, a{, b}, p; barrier is a synonym. Operands: result, barrier,
// threads, predicate. The mode counts sync, arrive, popc, and, or (exec.cpp).
void assemble_barrier(Assembler& assembler, const Statement& statement, Instruction& instruction) {
  const auto& operands = statement.operands;
  const bool reduction = statement.has("red");
  instruction.flow = Flow::barrier;
  size_t next = 0;
  instruction.operand[0] = assembler.scratch('w');
  if (reduction) {
    const bool count = statement.has("popc");
    instruction.mode = count ? 2 : statement.has("and") ? 3 : 4;
    instruction.operand[0] = assembler.destination(operands.at(next++), count ? 'w' : 'p');
    instruction.operand[3] = assembler.source(operands.back(), 'p');
  } else {
    instruction.mode = statement.has("arrive") ? 1 : 0;
  }
  instruction.operand[1] = assembler.source(operands.at(next++), 'w');
  const bool counted = operands.size() - (reduction ? 1 : 0) > next;
  instruction.operand[2] = counted ? assembler.source(operands.at(next), 'w') : assembler.literal(0, 'w');
}

}  // namespace

bool assemble_control(Assembler& assembler, const Statement& statement, Instruction& instruction) {
  const std::string& name = statement.name();
  if (name == "bra") {
    instruction.flow = Flow::branch;
    assembler.branch_target(statement.operands.at(0));
  } else if (name == "brx") {
    instruction.flow = Flow::branch_table;
    instruction.operand[0] = assembler.source(statement.operands.at(0), 'w');
    instruction.target = assembler.table_number(statement.operands.at(1));
  } else if (name == "ret" || name == "exit") {
    instruction.flow = Flow::exit;
  } else if ((name == "bar" || name == "barrier") && !statement.has("warp") && !statement.has("cluster")) {
    assemble_barrier(assembler, statement, instruction);
  } else if (name == "trap") {
    instruction.handler = trap;
  } else if (name == "membar" || name == "fence" || name == "nanosleep" || name == "griddepcontrol" ||
             name == "pragma" || name == "pmevent" || name == "brkpt") {
    instruction.handler = nothing;  // memory is in order, and time does not pass
  } else {
    return false;
  }
  return true;
}

}  // namespace ptxvm
