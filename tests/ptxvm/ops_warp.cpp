// Instructions in which the lanes of a warp exchange values.
#include "assemble.h"
#include "machine.h"

namespace ptxvm {
namespace {

enum ShuffleMode : uint8_t { kButterfly, kIndex, kDown, kUp };

// Operands: result, predicate, value, lane or distance, clamp and segment.
void shuffle(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  uint32_t* const d = warp.lanes<uint32_t>(instruction.operand[0]);
  const uint32_t* const a = warp.lanes<uint32_t>(instruction.operand[2]);
  const uint32_t* const b = warp.lanes<uint32_t>(instruction.operand[3]);
  const uint32_t* const c = warp.lanes<uint32_t>(instruction.operand[4]);
  uint32_t result[kLanes], inside = 0;
  for_lanes(lanes, [&](int lane) {
    const int segment = int(c[lane] >> 8 & 31), clamp = int(c[lane] & 31), by = int(b[lane] & 31);
    const int lowest = lane & segment, limit = lowest | (clamp & ~segment);
    int from = 0;
    bool in_range = false;
    switch (instruction.mode) {
      case kButterfly: from = lane ^ by, in_range = from <= limit; break;
      case kIndex: from = lowest | (by & ~segment), in_range = from <= limit; break;
      case kDown: from = lane + by, in_range = from <= limit; break;
      default: from = lane - by, in_range = from >= limit; break;
    }
    if (!in_range) from = lane;
    if (!(lanes >> from & 1)) {
      machine().findings.report("shuffle from an inactive lane", instruction, [&] {
        return "thread " + std::to_string(warp.thread(lane)) + " from lane " + std::to_string(from);
      });
      result[lane] = 0xFFFFFFFFu;
    } else {
      result[lane] = a[from];
    }
    inside |= uint32_t(in_range) << lane;
  });
  for_lanes(lanes, [&](int lane) { d[lane] = result[lane]; });
  uint32_t& predicate = warp.predicate(instruction.operand[1]);
  predicate = (predicate & ~lanes) | inside;
}

enum VoteMode : uint8_t { kBallot, kAny, kAll, kUniform };

// Operands: result, predicate. Each lane sees the votes of its own members.
void vote(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const uint32_t votes = warp.predicate(instruction.operand[1]) & lanes;
  const uint32_t* const members = warp.lanes<uint32_t>(instruction.members);
  uint32_t* const ballot = warp.lanes<uint32_t>(instruction.operand[0]);
  uint32_t result = 0;
  for_lanes(lanes, [&](int lane) {
    const uint32_t voters = members[lane] & lanes, yes = votes & voters;
    if (instruction.mode == kBallot) {
      ballot[lane] = yes;
    } else {
      const bool all = yes == voters, any = yes != 0;
      const bool answer = instruction.mode == kAny ? any : instruction.mode == kAll ? all : all || !any;
      result |= uint32_t(answer) << lane;
    }
  });
  if (instruction.mode == kBallot) return;
  uint32_t& d = warp.predicate(instruction.operand[0]);
  d = (d & ~lanes) | result;
}

// Operands: result, predicate (match.all), value.
template <class T, bool all>
void match(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  uint32_t* const d = warp.lanes<uint32_t>(instruction.operand[0]);
  const uint32_t* const members = warp.lanes<uint32_t>(instruction.members);
  T value[kLanes];
  std::memcpy(value, warp.lanes<T>(instruction.operand[2]), sizeof value);
  uint32_t unanimous = 0;
  for_lanes(lanes, [&](int lane) {
    uint32_t same = 0;
    for_lanes(members[lane] & lanes, [&](int other) { same |= uint32_t(value[other] == value[lane]) << other; });
    const bool everyone = same == (members[lane] & lanes);
    d[lane] = !all || everyone ? same : 0;
    unanimous |= uint32_t(everyone) << lane;
  });
  if (!all) return;
  uint32_t& predicate = warp.predicate(instruction.operand[1]);
  predicate = (predicate & ~lanes) | unanimous;
}

struct Add {
  template <class T>
  T operator()(T a, T b) const {
    return a + b;
  }
};
struct Min {
  template <class T>
  T operator()(T a, T b) const {
    return a < b ? a : b;
  }
};
struct Max {
  template <class T>
  T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};
struct And {
  uint32_t operator()(uint32_t a, uint32_t b) const { return a & b; }
};
struct Or {
  uint32_t operator()(uint32_t a, uint32_t b) const { return a | b; }
};
struct Xor {
  uint32_t operator()(uint32_t a, uint32_t b) const { return a ^ b; }
};

// Operands: result, value.
template <class Op, class T>
void reduce(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  T* const d = warp.lanes<T>(instruction.operand[0]);
  const uint32_t* const members = warp.lanes<uint32_t>(instruction.members);
  T value[kLanes];
  std::memcpy(value, warp.lanes<T>(instruction.operand[1]), sizeof value);
  for_lanes(lanes, [&](int lane) {
    uint32_t rest = members[lane] & lanes;
    T sum = value[__builtin_ctz(rest)];
    for (rest &= rest - 1; rest; rest &= rest - 1) sum = Op()(sum, value[__builtin_ctz(rest)]);
    d[lane] = sum;
  });
}

Handler choose_reduction(const Statement& statement) {
  const bool is_signed = statement.type() == "s32";
  if (statement.has("add")) return reduce<Add, uint32_t>;
  if (statement.has("min")) return is_signed ? reduce<Min, int32_t> : reduce<Min, uint32_t>;
  if (statement.has("max")) return is_signed ? reduce<Max, int32_t> : reduce<Max, uint32_t>;
  if (statement.has("and")) return reduce<And, uint32_t>;
  if (statement.has("or")) return reduce<Or, uint32_t>;
  if (statement.has("xor")) return reduce<Xor, uint32_t>;
  throw Unknown("reduction");
}

void sync_warp(Warp& warp, const Instruction&, uint32_t) { ++warp.sync_count; }

void active_mask(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  uint32_t* const d = warp.lanes<uint32_t>(instruction.operand[0]);
  for_lanes(lanes, [&](int lane) { d[lane] = lanes; });
}

// "%r1|%p1": the part before or after the bar; "_" where it is missing.
std::string part_of(const std::string& operand, bool second) {
  const size_t bar = operand.find('|');
  if (!second) return trimmed(operand.substr(0, bar));
  return bar == std::string::npos ? "_" : trimmed(operand.substr(bar + 1));
}

void assemble_shuffle(Assembler& assembler, const Statement& statement, Instruction& instruction) {
  const auto& operands = statement.operands;
  instruction.handler = shuffle;
  instruction.mode = statement.has("bfly")   ? kButterfly
                     : statement.has("idx")  ? kIndex
                     : statement.has("down") ? kDown
                                             : kUp;
  for (int i = 0; i < 3; ++i) instruction.operand[size_t(i) + 2] = assembler.source(operands.at(size_t(i) + 1), 'w');
  instruction.operand[0] = assembler.destination(part_of(operands[0], false), 'w');
  instruction.operand[1] = assembler.destination(part_of(operands[0], true), 'p');
}

void assemble_vote(Assembler& assembler, const Statement& statement, Instruction& instruction) {
  instruction.handler = vote;
  instruction.mode = statement.has("ballot") ? kBallot
                     : statement.has("any")  ? kAny
                     : statement.has("all")  ? kAll
                                             : kUniform;
  instruction.operand[1] = assembler.source(statement.operands.at(1), 'p');
  instruction.operand[0] = assembler.destination(statement.operands[0], instruction.mode == kBallot ? 'w' : 'p');
}

void assemble_match(Assembler& assembler, const Statement& statement, Instruction& instruction) {
  const bool all = statement.has("all"), wide = statement.type() == "b64";
  instruction.handler = all ? (wide ? match<uint64_t, true> : match<uint32_t, true>)
                            : (wide ? match<uint64_t, false> : match<uint32_t, false>);
  instruction.operand[2] = assembler.source(statement.operands.at(1), wide ? 'd' : 'w');
  instruction.operand[0] = assembler.destination(part_of(statement.operands[0], false), 'w');
  instruction.operand[1] = assembler.destination(part_of(statement.operands[0], true), 'p');
}

}  // namespace

bool assemble_warp(Assembler& assembler, const Statement& statement, Instruction& instruction) {
  const std::string& name = statement.name();
  if (name == "activemask") {
    instruction.handler = active_mask;
    instruction.operand[0] = assembler.destination(statement.operands.at(0), 'w');
    return true;
  }
  if (name == "shfl") {
    assemble_shuffle(assembler, statement, instruction);
  } else if (name == "vote") {
    assemble_vote(assembler, statement, instruction);
  } else if (name == "match") {
    assemble_match(assembler, statement, instruction);
  } else if (name == "redux") {
    instruction.handler = choose_reduction(statement);
    instruction.operand[1] = assembler.source(statement.operands.at(1), 'w');
    instruction.operand[0] = assembler.destination(statement.operands[0], 'w');
  } else if ((name == "bar" || name == "barrier") && statement.has("warp")) {
    instruction.handler = sync_warp;
  } else {
    return false;
  }
  // All are .sync: the last operand is the mask of the lanes that take part.
  instruction.flow = Flow::collective;
  instruction.members = assembler.source(statement.operands.back(), 'w');
  return true;
}

}  // namespace ptxvm
