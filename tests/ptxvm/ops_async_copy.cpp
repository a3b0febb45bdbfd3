// cp.async. The bytes arrive when a wait completes their group, not before: a kernel that forgets to wait reads what
// was there. (bulk copies and mbarriers are not known.)
#include <algorithm>

#include "addresses.h"
#include "machine.h"
#include "statistics.h"

namespace ptxvm {
namespace {

// Operands: destination (offset in shared memory), source, bytes to copy, predicate to ignore the source.
void copy(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  Machine& m = machine();
  const uint32_t size = instruction.size;
  uint64_t to[kLanes], from[kLanes];
  compute_addresses(warp, instruction, 0, lanes, to);
  const uint64_t* const source = warp.lanes<uint64_t>(instruction.operand[1]);
  const uint32_t* const wanted = warp.lanes<uint32_t>(instruction.operand[2]);
  const uint32_t ignored = warp.predicate(instruction.operand[3]);
  const uint64_t source_offset = uint64_t(instruction.immediate);
  uint32_t reading = 0;
  for_lanes(lanes, [&](int lane) {
    from[lane] = source[lane] + source_offset;
    if (wanted[lane] && !(ignored >> lane & 1)) reading |= 1u << lane;
  });
  uint32_t allowed = observe_accesses(warp, instruction, to, lanes, size, Access::write);
  if (m.check) {
    for (uint32_t rest = reading; rest; rest &= rest - 1) {
      const int lane = __builtin_ctz(rest);
      if (from[lane] % size) {
        m.findings.report("misaligned access", instruction, [] { return std::string("source of the copy"); });
      }
      if (!check_global(warp, instruction, lane, from[lane], std::min(wanted[lane], size), Access::read)) {
        reading &= ~(1u << lane);
      }
    }
  }
  if (m.statistics && reading) count_global(instruction, from, reading, size);
  for (; allowed; allowed &= allowed - 1) {
    const int lane = __builtin_ctz(allowed);
    const uint32_t valid = reading >> lane & 1 ? std::min(wanted[lane], size) : 0;
    const uint32_t offset = m.arena.offset(to[lane]);
    warp.copies.push_back(
        {warp.committed[size_t(lane)], offset, from[lane], uint8_t(lane), uint8_t(size), uint8_t(valid), &instruction});
    if (m.check) m.shadow.copy_started(warp, lane, offset, size);
  }
}

void commit(Warp& warp, const Instruction&, uint32_t lanes) {
  for_lanes(lanes, [&](int lane) { ++warp.committed[size_t(lane)]; });
}

void land(Warp& warp, const AsyncCopy& copy) {
  Machine& m = machine();
  uint8_t* const to = m.arena.base() + copy.destination;
  std::memcpy(to, reinterpret_cast<const void*>(copy.source), copy.valid);
  std::memset(to + copy.valid, 0, size_t(copy.size - copy.valid));
  if (m.check) m.shadow.copy_landed(warp, copy.lane, copy.destination, copy.size);
}

// Completes, for the active lanes, the groups before `end` of the lane.
template <class End>
void complete(Warp& warp, uint32_t lanes, End&& end) {
  const auto stays = [&](const AsyncCopy& copy) {
    if (!(lanes >> copy.lane & 1) || copy.group >= end(copy.lane)) return true;
    land(warp, copy);
    return false;
  };
  // In order, as later copies win.
  size_t kept = 0;
  for (size_t i = 0; i < warp.copies.size(); ++i) {
    if (stays(warp.copies[i])) warp.copies[kept++] = warp.copies[i];
  }
  warp.copies.resize(kept);
}

// All but the last `immediate` groups of each lane.
void wait_group(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const uint32_t pending = uint32_t(instruction.immediate);
  complete(warp, lanes, [&](int lane) {
    const uint32_t committed = warp.committed[size_t(lane)];
    return committed > pending ? committed - pending : 0;
  });
}

void wait_all(Warp& warp, const Instruction&, uint32_t lanes) {
  complete(warp, lanes, [](int) { return UINT32_MAX; });  // those not committed, too
}

}  // namespace

bool assemble_async_copy(Assembler& assembler, const Statement& statement, Instruction& instruction) {
  if (statement.name() != "cp" || !statement.has("async")) return false;
  const auto& operands = statement.operands;
  if (statement.has("commit_group")) {
    instruction.handler = commit;
  } else if (statement.has("wait_all")) {
    instruction.handler = wait_all;
  } else if (statement.has("wait_group")) {
    instruction.handler = wait_group;
    instruction.immediate = std::atoi(operands.at(0).c_str());
  } else if (statement.has("ca") || statement.has("cg")) {
    const uint32_t size = uint32_t(std::atoi(operands.at(2).c_str()));
    instruction.handler = copy;
    instruction.space = Space::shared;
    instruction.size = uint8_t(size);
    assembler.reaches_shared(size);
    Instruction source = instruction;
    assembler.address(operands[1], source, 0);
    if (!source.wide_address) throw Unknown("a source address of 32 bits");
    instruction.operand[1] = source.operand[0];
    instruction.immediate = source.offset;
    assembler.address(operands[0], instruction, 0);
    // "[to], [from], size", then nothing, the bytes to copy, or a predicate; a cache policy may follow.
    const bool hinted = statement.has("L2::cache_hint");
    const bool more = operands.size() > (hinted ? 4u : 3u);
    const bool predicate = more && assembler.is_predicate(operands[3]);
    instruction.operand[2] = more && !predicate ? assembler.source(operands[3], 'w') : assembler.literal(size, 'w');
    instruction.operand[3] = predicate ? assembler.source(operands[3], 'p') : assembler.literal(0, 'p');
  } else {
    return false;
  }
  return true;
}

}  // namespace ptxvm
