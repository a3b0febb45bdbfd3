// atom and red: the lanes of an instruction in order, one after the other.
#include <algorithm>

#include "addresses.h"
#include "assemble.h"

namespace ptxvm {
namespace {

struct Add {
  template <class T>
  T operator()(T old, T value, T) const {
    return T(old + value);
  }
};
struct Min {
  template <class T>
  T operator()(T old, T value, T) const {
    return std::min(old, value);
  }
};
struct Max {
  template <class T>
  T operator()(T old, T value, T) const {
    return std::max(old, value);
  }
};
struct And {
  template <class T>
  T operator()(T old, T value, T) const {
    return old & value;
  }
};
struct Or {
  template <class T>
  T operator()(T old, T value, T) const {
    return old | value;
  }
};
struct Xor {
  template <class T>
  T operator()(T old, T value, T) const {
    return old ^ value;
  }
};
struct Exchange {
  template <class T>
  T operator()(T, T value, T) const {
    return value;
  }
};
struct CompareAndSwap {
  template <class T>
  T operator()(T old, T expected, T value) const {
    return old == expected ? value : old;
  }
};
struct Increment {  // wraps to 0 past the operand
  template <class T>
  T operator()(T old, T limit, T) const {
    return old >= limit ? T(0) : T(old + 1);
  }
};
struct Decrement {
  template <class T>
  T operator()(T old, T limit, T) const {
    return old == 0 || old > limit ? limit : T(old - 1);
  }
};

// Operands: old value, address, operand, second operand.
template <class Op, class T>
void atomic(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  uint64_t address[kLanes];
  compute_addresses(warp, instruction, 1, lanes, address);
  lanes = observe_accesses(warp, instruction, address, lanes, sizeof(T), Access::atomic);
  T* const d = warp.lanes<T>(instruction.operand[0]);
  const T *a = warp.lanes<T>(instruction.operand[2]), *b = warp.lanes<T>(instruction.operand[3]);
  for (; lanes; lanes &= lanes - 1) {
    const int lane = __builtin_ctz(lanes);
    T& place = *reinterpret_cast<T*>(address[lane]);
    const T old = place;
    place = Op()(old, a[lane], b[lane]);
    d[lane] = old;
  }
}

template <class T>
Handler integer_atomic(const Statement& statement) {
  if (statement.has("add")) return atomic<Add, T>;
  if (statement.has("min")) return atomic<Min, T>;
  if (statement.has("max")) return atomic<Max, T>;
  if (statement.has("and")) return atomic<And, T>;
  if (statement.has("or")) return atomic<Or, T>;
  if (statement.has("xor")) return atomic<Xor, T>;
  if (statement.has("exch")) return atomic<Exchange, T>;
  if (statement.has("cas")) return atomic<CompareAndSwap, T>;
  if (statement.has("inc")) return atomic<Increment, T>;
  if (statement.has("dec")) return atomic<Decrement, T>;
  throw Unknown("atomic operation");
}

Handler choose(const Statement& statement) {
  const std::string& type = statement.type();
  if (type == "s32") return integer_atomic<int32_t>(statement);
  if (type == "u32" || type == "b32") return integer_atomic<uint32_t>(statement);
  if (type == "s64") return integer_atomic<int64_t>(statement);
  if (type == "u64" || type == "b64") return integer_atomic<uint64_t>(statement);
  if (type == "f32" && statement.has("add")) return atomic<Add, float>;
  if (type == "f64" && statement.has("add")) return atomic<Add, double>;
  throw Unknown("type of the atomic operation");
}

}  // namespace

bool assemble_atomic(Assembler& assembler, const Statement& statement, Instruction& instruction) {
  const bool reduction = statement.name() == "red";
  if (!reduction && statement.name() != "atom") return false;
  if (statement.has("async")) return false;
  const uint32_t bytes = type_bytes(statement.type());
  const char type = bytes == 8 ? 'd' : 'w';
  const size_t first = reduction ? 0 : 1;  // operand that is the address
  instruction.handler = choose(statement);
  instruction.space = space_of(statement);
  if (instruction.space == Space::shared || instruction.space == Space::generic) assembler.reaches_shared(bytes);
  assembler.address(statement.operands.at(first), instruction, 1);
  instruction.operand[2] = assembler.source(statement.operands.at(first + 1), type);
  instruction.operand[3] =
      statement.has("cas") ? assembler.source(statement.operands.at(first + 2), type) : assembler.literal(0, type);
  instruction.operand[0] = reduction ? assembler.scratch(type) : assembler.destination(statement.operands[0], type);
  return true;
}

}  // namespace ptxvm
