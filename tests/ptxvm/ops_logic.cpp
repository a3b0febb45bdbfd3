// Bits: logic, shifts, fields, permutations, selection, moves, predicates.
#include "opcodes.h"

namespace ptxvm {
namespace {

struct And {
  template <class T>
  T operator()(T a, T b) const {
    return T(a & b);
  }
};
struct Or {
  template <class T>
  T operator()(T a, T b) const {
    return T(a | b);
  }
};
struct Xor {
  template <class T>
  T operator()(T a, T b) const {
    return T(a ^ b);
  }
};
struct Not {
  template <class T>
  T operator()(T a) const {
    return T(~a);
  }
};
struct LogicalNot {
  template <class T>
  T operator()(T a) const {
    return T(a == 0);
  }
};
// Shifts by the width or more shift everything out.
struct ShiftLeft {
  template <class T>
  T operator()(T a, uint32_t by) const {
    return by >= 8 * sizeof(T) ? T(0) : T(a << by);
  }
};
struct ShiftRight {
  template <class T>
  T operator()(T a, uint32_t by) const {
    return by >= 8 * sizeof(T) ? T(a < 0 ? -1 : 0) : T(a >> by);
  }
};
// Funnel shifts of the 64 bits high:low. .clamp: by at most 32; .wrap: by its low five bits.
template <bool wrap>
struct FunnelLeft {
  uint32_t operator()(uint32_t low, uint32_t high, uint32_t by) const {
    by = wrap ? by & 31 : by > 32 ? 32 : by;
    return uint32_t(((uint64_t(high) << 32 | low) << by) >> 32);
  }
};
template <bool wrap>
struct FunnelRight {
  uint32_t operator()(uint32_t low, uint32_t high, uint32_t by) const {
    by = wrap ? by & 31 : by > 32 ? 32 : by;
    return uint32_t((uint64_t(high) << 32 | low) >> by);
  }
};
struct LookUp3 {
  uint32_t operator()(uint32_t a, uint32_t b, uint32_t c, uint32_t table) const {
    uint32_t result = 0;
    for (int k = 0; k < 8; ++k) {
      if (table >> k & 1) result |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
    }
    return result;
  }
};
struct Permute {
  uint32_t operator()(uint32_t a, uint32_t b, uint32_t selectors) const {
    const uint64_t bytes = a | uint64_t(b) << 32;
    uint32_t result = 0;
    for (int k = 0; k < 4; ++k) {
      const uint32_t selector = selectors >> 4 * k & 15;
      uint32_t byte = uint32_t(bytes >> 8 * (selector & 7)) & 255;
      if (selector & 8) byte = byte & 128 ? 255 : 0;  // the byte's sign, replicated
      result |= byte << 8 * k;
    }
    return result;
  }
};
// Only the low 8 bits of position and length count.
struct FieldExtract {
  template <class T>
  T operator()(T a, uint32_t position, uint32_t length) const {
    using U = std::make_unsigned_t<T>;
    constexpr uint32_t bits = 8 * sizeof(T);
    position &= 255, length &= 255;
    if (length == 0) return 0;
    const uint32_t last = position + length - 1 < bits ? position + length - 1 : bits - 1;
    const bool sign = std::is_signed_v<T> && (U(a) >> last & 1);
    const U mask = length >= bits ? U(-1) : U((U(1) << length) - 1);
    U result = position >= bits ? 0 : U(U(a) >> position) & mask;
    // Bits past the end of `a` and, if signed, past the field take the sign.
    const uint32_t held = position >= bits ? 0 : last - position + 1;
    if (sign && held < bits) result |= U(U(-1) << held);
    return T(result);
  }
};
struct FieldInsert {
  template <class T>
  T operator()(T field, T into, uint32_t position, uint32_t length) const {
    constexpr uint32_t bits = 8 * sizeof(T);
    position &= 255, length &= 255;
    if (position >= bits) return into;
    const T mask = T((length >= bits ? T(-1) : T((T(1) << length) - 1)) << position);
    return T((into & ~mask) | (T(field << position) & mask));
  }
};
struct PopulationCount {
  uint32_t operator()(uint64_t a) const { return uint32_t(__builtin_popcountll(a)); }
};
struct LeadingZeros {
  uint32_t operator()(uint32_t a) const { return a ? uint32_t(__builtin_clz(a)) : 32; }
  uint32_t operator()(uint64_t a) const { return a ? uint32_t(__builtin_clzll(a)) : 64; }
};
struct Reverse {
  template <class T>
  T operator()(T a) const {
    T result = 0;
    for (size_t bit = 0; bit < 8 * sizeof(T); ++bit) result = T(result << 1 | (a >> bit & 1));
    return result;
  }
};
// Position of the highest bit that differs from the sign; .shiftamt: how far to shift it to the top.
template <bool shift_amount>
struct FindHighest {
  template <class T>
  uint32_t operator()(T a) const {
    using U = std::make_unsigned_t<T>;
    const uint64_t bits = std::is_signed_v<T> && a < 0 ? U(~a) : U(a);
    if (!bits) return ~0u;
    const uint32_t position = 63 - uint32_t(__builtin_clzll(bits));
    return shift_amount ? uint32_t(8 * sizeof(T)) - 1 - position : position;
  }
};
struct Same {
  template <class T>
  T operator()(T a) const {
    return a;
  }
};
struct SelectBySign {  // slct: a where c >= 0
  template <class T, class C>
  T operator()(T a, T b, C c) const {
    return c >= 0 ? a : b;
  }
};

template <class T>
void select(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  T* const d = warp.lanes<T>(instruction.operand[0]);
  const T *a = warp.lanes<T>(instruction.operand[1]), *b = warp.lanes<T>(instruction.operand[2]);
  const uint32_t predicate = warp.predicate(instruction.operand[3]);
  for_lanes(lanes, [&](int lane) { d[lane] = predicate >> lane & 1 ? a[lane] : b[lane]; });
}

// Predicates are masks: one operation for all lanes.
template <class Op>
void predicate_binary(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const uint32_t a = warp.predicate(instruction.operand[1]), b = warp.predicate(instruction.operand[2]);
  uint32_t& d = warp.predicate(instruction.operand[0]);
  d = (d & ~lanes) | (Op()(a, b) & lanes);
}
template <class Op>
void predicate_unary(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const uint32_t a = warp.predicate(instruction.operand[1]);
  uint32_t& d = warp.predicate(instruction.operand[0]);
  d = (d & ~lanes) | (Op()(a) & lanes);
}

template <class Op, int operands>
void define_bits(OpcodeTable& table, const std::string& name) {
  const auto one = [&](auto zero, const char* type) {
    using T = decltype(zero);
    if constexpr (operands == 1) define<Op, T, T>(table, name + type);
    if constexpr (operands == 2) define<Op, T, T, T>(table, name + type);
  };
  one(uint16_t(), ".b16"), one(uint32_t(), ".b32"), one(uint64_t(), ".b64");
}

// `types` share a width: bits move the same way whatever they mean.
template <class T>
void define_moves(OpcodeTable& table, std::initializer_list<const char*> types) {
  for (const char* type : types) {
    define<Same, T, T>(table, std::string("mov.") + type);
    table[std::string("selp.") + type] = {select<T>, {letter<T>(), letter<T>(), letter<T>(), 'p'}};
    define<SelectBySign, T, T, T, int32_t>(table, std::string("slct.") + type + ".s32");
    define<SelectBySign, T, T, T, float>(table, std::string("slct.") + type + ".f32");
  }
}

template <class T>
void define_shift(OpcodeTable& table, const char* name) {
  define<ShiftRight, T, T, uint32_t>(table, name);
}

}  // namespace

void add_logic(OpcodeTable& table) {
  define_bits<And, 2>(table, "and");
  define_bits<Or, 2>(table, "or");
  define_bits<Xor, 2>(table, "xor");
  define_bits<Not, 1>(table, "not");
  define_bits<LogicalNot, 1>(table, "cnot");
  table["and.pred"] = {predicate_binary<And>, "ppp"};
  table["or.pred"] = {predicate_binary<Or>, "ppp"};
  table["xor.pred"] = {predicate_binary<Xor>, "ppp"};
  table["not.pred"] = {predicate_unary<Not>, "pp"};
  table["mov.pred"] = {predicate_unary<Same>, "pp"};

  define<ShiftLeft, uint16_t, uint16_t, uint32_t>(table, "shl.b16");
  define<ShiftLeft, uint32_t, uint32_t, uint32_t>(table, "shl.b32");
  define<ShiftLeft, uint64_t, uint64_t, uint32_t>(table, "shl.b64");
  define_shift<uint16_t>(table, "shr.u16"), define_shift<uint16_t>(table, "shr.b16");
  define_shift<uint32_t>(table, "shr.u32"), define_shift<uint32_t>(table, "shr.b32");
  define_shift<uint64_t>(table, "shr.u64"), define_shift<uint64_t>(table, "shr.b64");
  define_shift<int16_t>(table, "shr.s16"), define_shift<int32_t>(table, "shr.s32");
  define_shift<int64_t>(table, "shr.s64");
  define<FunnelLeft<true>, uint32_t, uint32_t, uint32_t, uint32_t>(table, "shf.l.wrap.b32");
  define<FunnelLeft<false>, uint32_t, uint32_t, uint32_t, uint32_t>(table, "shf.l.clamp.b32");
  define<FunnelRight<true>, uint32_t, uint32_t, uint32_t, uint32_t>(table, "shf.r.wrap.b32");
  define<FunnelRight<false>, uint32_t, uint32_t, uint32_t, uint32_t>(table, "shf.r.clamp.b32");

  define<LookUp3, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t>(table, "lop3.b32");
  define<Permute, uint32_t, uint32_t, uint32_t, uint32_t>(table, "prmt.b32");
  define<FieldExtract, uint32_t, uint32_t, uint32_t, uint32_t>(table, "bfe.u32");
  define<FieldExtract, int32_t, int32_t, uint32_t, uint32_t>(table, "bfe.s32");
  define<FieldExtract, uint64_t, uint64_t, uint32_t, uint32_t>(table, "bfe.u64");
  define<FieldExtract, int64_t, int64_t, uint32_t, uint32_t>(table, "bfe.s64");
  define<FieldInsert, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t>(table, "bfi.b32");
  define<FieldInsert, uint64_t, uint64_t, uint64_t, uint32_t, uint32_t>(table, "bfi.b64");
  define<PopulationCount, uint32_t, uint32_t>(table, "popc.b32");
  define<PopulationCount, uint32_t, uint64_t>(table, "popc.b64");
  define<LeadingZeros, uint32_t, uint32_t>(table, "clz.b32");
  define<LeadingZeros, uint32_t, uint64_t>(table, "clz.b64");
  define<Reverse, uint32_t, uint32_t>(table, "brev.b32");
  define<Reverse, uint64_t, uint64_t>(table, "brev.b64");
  define<FindHighest<false>, uint32_t, uint32_t>(table, "bfind.u32");
  define<FindHighest<false>, uint32_t, int32_t>(table, "bfind.s32");
  define<FindHighest<false>, uint32_t, uint64_t>(table, "bfind.u64");
  define<FindHighest<false>, uint32_t, int64_t>(table, "bfind.s64");
  define<FindHighest<true>, uint32_t, uint32_t>(table, "bfind.shiftamt.u32");
  define<FindHighest<true>, uint32_t, int32_t>(table, "bfind.shiftamt.s32");

  define_moves<uint16_t>(table, {"b16", "u16", "s16", "f16", "bf16"});
  define_moves<uint32_t>(table, {"b32", "u32", "s32", "f32"});
  define_moves<uint64_t>(table, {"b64", "u64", "s64", "f64"});
}

}  // namespace ptxvm
