// Comparisons: setp and set.
#include "assemble.h"
#include "opcodes.h"

namespace ptxvm {
namespace {

struct Less {
  template <class T>
  bool operator()(T a, T b) const {
    return a < b;
  }
};
struct LessEqual {
  template <class T>
  bool operator()(T a, T b) const {
    return a <= b;
  }
};
struct Greater {
  template <class T>
  bool operator()(T a, T b) const {
    return a > b;
  }
};
struct GreaterEqual {
  template <class T>
  bool operator()(T a, T b) const {
    return a >= b;
  }
};
struct Equal {
  template <class T>
  bool operator()(T a, T b) const {
    return a == b;
  }
};
// Float's "ne" is false for NaN, unlike C's !=; for integers the two agree.
struct NotEqual {
  template <class T>
  bool operator()(T a, T b) const {
    return a < b || a > b;
  }
};
// ltu, equ, ...: true for NaN too.
template <class Op>
struct OrUnordered {
  template <class T>
  bool operator()(T a, T b) const {
    return a != a || b != b || Op()(a, b);
  }
};
struct Ordered {
  template <class T>
  bool operator()(T a, T b) const {
    return a == a && b == b;
  }
};
struct Unordered {
  template <class T>
  bool operator()(T a, T b) const {
    return a != a || b != b;
  }
};

uint32_t combined(uint32_t result, uint32_t with, BoolOp op) {
  return op == BoolOp::both ? result & with : op == BoolOp::either ? result | with : result ^ with;
}

// p, q, a, b, c: p = (a op b) combined with c, q = !(a op b) combined with c.
template <class Op, class T>
void set_predicate(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const T *a = warp.lanes<T>(instruction.operand[2]), *b = warp.lanes<T>(instruction.operand[3]);
  const uint32_t c = warp.predicate(instruction.operand[4]);
  const BoolOp op = BoolOp(instruction.mode);
  uint32_t result = 0;
  for (int lane = 0; lane < kLanes; ++lane) result |= uint32_t(Op()(a[lane], b[lane])) << lane;
  uint32_t &p = warp.predicate(instruction.operand[0]), &q = warp.predicate(instruction.operand[1]);
  q = (q & ~lanes) | (combined(~result, c, op) & lanes);
  p = (p & ~lanes) | (combined(result, c, op) & lanes);
}

template <class Op>
struct AllOnes {  // set.u32, set.s32
  template <class T>
  uint32_t operator()(T a, T b) const {
    return Op()(a, b) ? ~0u : 0;
  }
};
template <class Op, class T>
void define_one(OpcodeTable& table, const std::string& op, const char* type = suffix<T>()) {
  const std::string name = op + ".";
  table["setp." + name + type] = {set_predicate<Op, T>, {'p', 'p', letter<T>(), letter<T>(), 'p'}};
  if constexpr (sizeof(T) == 4) {
    define<AllOnes<Op>, uint32_t, T, T>(table, "set." + name + "u32." + type);
    define<AllOnes<Op>, uint32_t, T, T>(table, "set." + name + "s32." + type);
  }
}

template <class Op, class... T>
void define_for(OpcodeTable& table, const char* op) {
  (define_one<Op, T>(table, op), ...);
}

template <class Op>
void define_comparison(OpcodeTable& table, const char* op, const char* unsigned_op = nullptr) {
  define_for<Op, int16_t, int32_t, int64_t, uint16_t, uint32_t, uint64_t, float, double, Half, BFloat16>(table, op);
  define_one<Op, uint16_t>(table, op, "b16");
  define_one<Op, uint32_t>(table, op, "b32");
  define_one<Op, uint64_t>(table, op, "b64");
  define_for<OrUnordered<Op>, float, double, Half, BFloat16>(table, (std::string(op) + "u").c_str());
  if (unsigned_op) define_for<Op, uint16_t, uint32_t, uint64_t>(table, unsigned_op);
}

}  // namespace

void add_comparisons(OpcodeTable& table) {
  define_comparison<Less>(table, "lt", "lo");
  define_comparison<LessEqual>(table, "le", "ls");
  define_comparison<Greater>(table, "gt", "hi");
  define_comparison<GreaterEqual>(table, "ge", "hs");
  define_comparison<Equal>(table, "eq");
  define_comparison<NotEqual>(table, "ne");
  define_for<Ordered, float, double, Half, BFloat16>(table, "num");
  define_for<Unordered, float, double, Half, BFloat16>(table, "nan");
}

}  // namespace ptxvm
