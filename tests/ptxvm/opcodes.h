// The opcodes that work on each lane alone and whose operands follow from the opcode: a table from name to handler.
//
// Names are without the modifiers that change nothing here (assemble.cpp): "add.f32" serves add.rn.ftz.f32.
// Types: one letter per operand, the result first. b, h, w, d: 8, 16, 32, 64 bits; capital: signed; p: predicate.
#pragma once
#include <string>
#include <unordered_map>
#include <utility>

#include "exec.h"
#include "number.h"

namespace ptxvm {

struct Opcode {
  Handler handler;
  std::string types;
};
using OpcodeTable = std::unordered_map<std::string, Opcode>;

const OpcodeTable& opcode_table();
void add_integer_arithmetic(OpcodeTable& table);
void add_float_arithmetic(OpcodeTable& table);
void add_logic(OpcodeTable& table);
void add_comparisons(OpcodeTable& table);
void add_integer_conversions(OpcodeTable& table);
void add_float_conversions(OpcodeTable& table);

template <class T>
constexpr char letter() {
  constexpr bool is_signed = std::is_integral_v<T> && std::is_signed_v<T>;
  return sizeof(T) == 1   ? (is_signed ? 'B' : 'b')
         : sizeof(T) == 2 ? (is_signed ? 'H' : 'h')
         : sizeof(T) == 4 ? (is_signed ? 'W' : 'w')
                          : (is_signed ? 'D' : 'd');
}

// PTX's name of a type.
template <class T>
constexpr const char* suffix() {
  if constexpr (std::is_same_v<T, Half>) return "f16";
  if constexpr (std::is_same_v<T, BFloat16>) return "bf16";
  if constexpr (std::is_same_v<T, Pair<Half>>) return "f16x2";
  if constexpr (std::is_same_v<T, Pair<BFloat16>>) return "bf16x2";
  if constexpr (std::is_same_v<T, float>) return "f32";
  if constexpr (std::is_same_v<T, double>) return "f64";
  if constexpr (std::is_same_v<T, int8_t>) return "s8";
  if constexpr (std::is_same_v<T, int16_t>) return "s16";
  if constexpr (std::is_same_v<T, int32_t>) return "s32";
  if constexpr (std::is_same_v<T, int64_t>) return "s64";
  if constexpr (std::is_same_v<T, uint8_t>) return "u8";
  if constexpr (std::is_same_v<T, uint16_t>) return "u16";
  if constexpr (std::is_same_v<T, uint32_t>) return "u32";
  if constexpr (std::is_same_v<T, uint64_t>) return "u64";
}

// to[lane] = from[lane] for the lanes whose bit is set.
template <class T>
inline void store_lanes(T* to, const T* from, uint32_t lanes) {
  if (lanes == kAllLanes) {
    std::memcpy(to, from, kLanes * sizeof(T));
  } else {
    for (; lanes; lanes &= lanes - 1) to[__builtin_ctz(lanes)] = from[__builtin_ctz(lanes)];
  }
}

template <class Op, class D, class... A, size_t... I>
inline void elementwise_with(Warp& warp, const Instruction& instruction, uint32_t lanes, std::index_sequence<I...>) {
  const std::tuple<const A*...> a{warp.lanes<A>(instruction.operand[I + 1])...};
  D result[kLanes];  // of all lanes, active or not: one loop, which the compiler vectorises
  for (int lane = 0; lane < kLanes; ++lane) result[lane] = D(Op()(std::get<I>(a)[lane]...));
  store_lanes(warp.lanes<D>(instruction.operand[0]), result, lanes);
}

// result = Op(operands), lane by lane.
template <class Op, class D, class... A>
void elementwise(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  elementwise_with<Op, D, A...>(warp, instruction, lanes, std::index_sequence_for<A...>());
}

template <class Op, class D, class... A>
void define(OpcodeTable& table, const std::string& name) {
  table[name] = {elementwise<Op, D, A...>, {letter<D>(), letter<A>()...}};
}

// The same without vectorisation, for the many opcodes that nvcc rarely writes: quicker to compile.
template <class Op, class D, class A>
void elementwise_rare(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  D* const d = warp.lanes<D>(instruction.operand[0]);
  const A* const a = warp.lanes<A>(instruction.operand[1]);
  for (; lanes; lanes &= lanes - 1) d[__builtin_ctz(lanes)] = D(Op()(a[__builtin_ctz(lanes)]));
}
template <class Op, class D, class A>
void define_rare(OpcodeTable& table, const std::string& name) {
  table[name] = {elementwise_rare<Op, D, A>, {letter<D>(), letter<A>()}};
}

// name.T for each T, with operands and result of type T.
template <class Op, class... T>
void define_unary(OpcodeTable& table, const std::string& name) {
  (define<Op, T, T>(table, name + "." + suffix<T>()), ...);
}
template <class Op, class... T>
void define_binary(OpcodeTable& table, const std::string& name) {
  (define<Op, T, T, T>(table, name + "." + suffix<T>()), ...);
}
template <class Op, class... T>
void define_ternary(OpcodeTable& table, const std::string& name) {
  (define<Op, T, T, T, T>(table, name + "." + suffix<T>()), ...);
}

}  // namespace ptxvm
