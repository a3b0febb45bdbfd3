#include "exec.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "machine.h"

namespace ptxvm {

// How bar instructions are told apart: Instruction::mode. Operands: result, barrier, threads, predicate.
enum BarrierMode : uint8_t { kSync, kArrive, kCount, kAnd, kOr };

static uint32_t active_lanes(const Warp& warp, const Instruction& instruction, uint32_t lanes) {
  if (instruction.guard < 0) return lanes;
  const uint32_t guard = warp.predicate(uint32_t(instruction.guard));
  return lanes & (instruction.guard_negated ? ~guard : guard);
}

// Lanes that the active ones wait for at a .sync instruction.
static uint32_t missing_lanes(const Warp& warp, const Instruction& instruction, uint32_t active) {
  const uint32_t* members = warp.lanes<uint32_t>(instruction.members);
  uint32_t needed = 0;
  for (uint32_t rest = active; rest; rest &= rest - 1) needed |= members[__builtin_ctz(rest)];
  return needed & warp.live & ~active;
}

static std::string hexadecimal(uint32_t lanes) {
  char text[11];
  snprintf(text, sizeof text, "0x%08x", lanes);
  return text;
}

// ---- Setting up a block
// ----------------------------------------------------------------------------------------------

Block::Block(const Kernel& kernel_, Dimensions grid_, Dimensions block_, uint32_t dynamic_shared)
    : kernel(kernel_), grid(grid_), block(block_) {
  const uint32_t alignment = kernel.dynamic_shared_alignment;
  dynamic_shared_offset = (kernel.static_shared + alignment - 1) / alignment * alignment;
  shared_bytes = dynamic_shared ? dynamic_shared_offset + dynamic_shared : kernel.static_shared;
  if (shared_bytes > SharedArena::kBytes) throw Fault("kernel " + kernel.name + ": too much shared memory");
  const uint32_t count = (threads() + kLanes - 1) / kLanes;
  warps.resize(count);
  register_memory.resize(size_t(count) * kernel.file_bytes / 8 + 8, ~uint64_t{0});  // NaN
  local_memory.resize(size_t(count) * kLanes * kernel.local_bytes / 8);
  const uint64_t start = (reinterpret_cast<uint64_t>(register_memory.data()) + 63) & ~uint64_t{63};
  for (uint32_t i = 0; i < count; ++i) {
    warps[i].block = this;
    warps[i].id = int(i);
    warps[i].registers = reinterpret_cast<uint8_t*>(start) + size_t(i) * kernel.file_bytes;
    for (const Preset& preset : kernel.presets) fill_preset(warps[i], preset);
  }
}

uint64_t Block::special(const Warp& warp, int lane, uint64_t which) const {
  const uint32_t thread = uint32_t(warp.thread(lane)), bit = 1u << lane;
  switch (which) {
    case kTidX: return thread % block.x;
    case kTidY: return thread / block.x % block.y;
    case kTidZ: return thread / block.x / block.y;
    case kNtidX: return block.x;
    case kNtidY: return block.y;
    case kNtidZ: return block.z;
    case kCtaidX: return index.x;
    case kCtaidY: return index.y;
    case kCtaidZ: return index.z;
    case kNctaidX: return grid.x;
    case kNctaidY: return grid.y;
    case kNctaidZ: return grid.z;
    case kLaneid: return uint32_t(lane);
    case kWarpid: return uint32_t(warp.id);
    case kNwarpid: return warps.size();
    case kLanemaskEq: return bit;
    case kLanemaskLt: return bit - 1;
    case kLanemaskLe: return bit | (bit - 1);
    case kLanemaskGt: return ~(bit | (bit - 1));
    case kLanemaskGe: return ~(bit - 1);
    case kDynamicSmemSize: return shared_bytes > kernel.static_shared ? shared_bytes - dynamic_shared_offset : 0;
    default: return shared_bytes;
  }
}

void Block::fill_preset(Warp& warp, const Preset& preset) {
  uint8_t* place = warp.registers + preset.place;
  if (preset.size == 0) {
    warp.predicate(preset.place) = preset.value ? kAllLanes : 0;
    return;
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    uint64_t value = preset.value;
    if (preset.kind == Preset::Kind::dynamic_shared) value += dynamic_shared_offset;
    if (preset.kind == Preset::Kind::special) value = special(warp, lane, preset.value);
    if (preset.kind == Preset::Kind::local) {
      value += reinterpret_cast<uint64_t>(local_memory.data()) + uint64_t(warp.thread(lane)) * kernel.local_bytes;
    }
    std::memcpy(place + lane * preset.size, &value, preset.size);  // little-endian: the low bytes
  }
}

void Block::reset() {
  Machine& m = machine();
  std::memset(m.arena.base(), 0xFF, shared_bytes);  // NaN
  std::memset(local_memory.data(), 0xFF, local_memory.size() * sizeof(uint64_t));
  if (m.check) m.shadow.begin_block(shared_bytes, kernel.smallest_access);
  barriers.fill(Barrier());
  for (Warp& warp : warps) {
    const uint32_t first = uint32_t(warp.id) * kLanes, lanes = std::min<uint32_t>(kLanes, threads() - first);
    warp.live = lanes == kLanes ? kAllLanes : (1u << lanes) - 1;
    warp.groups.assign(1, {0, warp.live, false});
    warp.at_barrier = false;
    warp.sync_count = 0;
    warp.clock.fill(0);
    warp.clock[size_t(warp.id)] = 1;
    warp.copies.clear();
    warp.committed.fill(0);
    for (const Preset& preset : kernel.presets) {
      const bool of_block = preset.kind == Preset::Kind::special && preset.value >= kCtaidX && preset.value <= kCtaidZ;
      if (of_block) fill_preset(warp, preset);
    }
  }
}

// ---- Warps
// -----------------------------------------------------------------------------------------------------------

// Runs the warp until every group is parked or gone. True: something ran.
bool Block::run_warp(Warp& warp) {
  bool ran = false;
  for (;;) {
    const auto lower = [](const Group& a, const Group& b) {
      return a.parked != b.parked ? b.parked : a.pc < b.pc;  // running groups first
    };
    const auto best = std::min_element(warp.groups.begin(), warp.groups.end(), lower);
    if (best == warp.groups.end()) return ran;
    if (best->parked) {
      if (!wake(warp)) return ran;
      continue;
    }
    const Group group = *best;
    warp.groups.erase(best);
    run_group(warp, group);
    ran = true;
  }
}

// All groups are parked. Lets those go on whose missing lanes have exited meanwhile; none at a .sync instruction may
// stay.
bool Block::wake(Warp& warp) {
  for (const Group& group : warp.groups) {
    const Instruction& instruction = kernel.code[group.pc];
    if (instruction.flow != Flow::collective) continue;
    uint32_t here = 0;
    for (const Group& other : warp.groups) here |= other.pc == group.pc ? other.lanes : 0;
    const uint32_t active = active_lanes(warp, instruction, here), missing = missing_lanes(warp, instruction, active);
    if (missing) {
      fault(instruction, "divergent .sync instruction: lanes " + hexadecimal(active) + " of warp " +
                             std::to_string(warp.id) + " are here, lanes " + hexadecimal(missing) + " never come");
    }
    const uint32_t pc = group.pc;
    warp.groups.erase(std::remove_if(warp.groups.begin(), warp.groups.end(), [&](auto& g) { return g.pc == pc; }),
                      warp.groups.end());
    warp.groups.push_back({pc, here, false});
    return true;
  }
  return false;
}

// Takes the lanes of all groups at `pc` over into `lanes`; `parked` ones too if asked.
static void absorb(Warp& warp, uint32_t pc, bool parked, uint32_t& lanes) {
  for (size_t i = 0; i < warp.groups.size();) {
    if (warp.groups[i].pc == pc && (parked || !warp.groups[i].parked)) {
      lanes |= warp.groups[i].lanes;
      warp.groups[i] = warp.groups.back();
      warp.groups.pop_back();
    } else {
      ++i;
    }
  }
}

// True: all lanes that a .sync instruction waits for are here (`lanes` may have grown). False: the group is parked.
bool Block::gather(Warp& warp, const Instruction& instruction, uint32_t pc, uint32_t& lanes) {
  if (!missing_lanes(warp, instruction, active_lanes(warp, instruction, lanes))) return true;
  absorb(warp, pc, true, lanes);
  if (!missing_lanes(warp, instruction, active_lanes(warp, instruction, lanes))) return true;
  warp.groups.push_back({pc, lanes, true});
  return false;
}

static void branch_by_table(const Kernel& kernel, Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const auto& table = kernel.branch_tables[instruction.target];
  const uint32_t* index = warp.lanes<uint32_t>(instruction.operand[0]);
  for (; lanes; lanes &= lanes - 1) {
    const int lane = __builtin_ctz(lanes);
    if (index[lane] >= table.size()) fault(instruction, "index beyond the branch table");
    warp.groups.push_back({table[index[lane]], 1u << lane, false});  // lanes with one target merge when they run
  }
}

void Block::run_group(Warp& warp, Group group) {
  uint32_t pc = group.pc, lanes = group.lanes;
  uint32_t next;  // lowest program counter of the other running groups
  const auto merge = [&] {
    absorb(warp, pc, false, lanes);
    next = UINT32_MAX;
    for (const Group& other : warp.groups) {
      if (!other.parked) next = std::min(next, other.pc);
    }
  };
  merge();
  uint64_t& executed = machine().executed;
  for (;;) {
    if (pc == next) merge();
    if (pc > next) return warp.groups.push_back({pc, lanes, false});
    const Instruction& instruction = kernel.code[pc];
    const uint32_t active = active_lanes(warp, instruction, lanes);
    ++executed;
    if (!active) {
      ++pc;
      continue;
    }
    switch (instruction.flow) {
      case Flow::plain:
        instruction.handler(warp, instruction, active);
        ++pc;
        break;
      case Flow::collective:
        if (!gather(warp, instruction, pc, lanes)) return;
        instruction.handler(warp, instruction, active_lanes(warp, instruction, lanes));
        ++pc;
        merge();
        break;
      case Flow::branch:
        if (executed - executed_before > machine().limit) fault(instruction, "endless loop");
        if (active == lanes) {
          pc = instruction.target;
        } else {
          warp.groups.push_back({instruction.target, active, false});
          lanes &= ~active;
          ++pc;
        }
        merge();
        break;
      case Flow::branch_table:
        branch_by_table(kernel, warp, instruction, active);
        lanes &= ~active;
        if (!lanes) return;
        ++pc;
        merge();
        break;
      case Flow::exit:
        warp.live &= ~active;
        lanes &= ~active;
        if (!lanes) return;
        ++pc;
        break;
      case Flow::barrier:
        warp.groups.push_back({pc, active, true});
        lanes &= ~active;
        if (!lanes) return;
        ++pc;
        break;
    }
  }
}

// ---- Barriers
// --------------------------------------------------------------------------------------------------------

// All groups of the warp are parked at barriers: the warp arrives.
void Block::arrive(Warp& warp) {
  const uint32_t pc = warp.groups[0].pc;
  const Instruction& instruction = kernel.code[pc];
  for (const Group& group : warp.groups) {
    if (group.pc == pc) continue;
    const std::string other = kernel.code[group.pc].source->where;
    machine().findings.report("barrier in divergent code", instruction,
                              [&] { return "other lanes of warp " + std::to_string(warp.id) + " wait at " + other; });
  }
  const int lane = __builtin_ctz(warp.live);
  const uint32_t id = warp.lanes<uint32_t>(instruction.operand[1])[lane];
  if (id >= kBarriers) fault(instruction, "no barrier " + std::to_string(id));
  Barrier& barrier = barriers[id];
  barrier.expected = warp.lanes<uint32_t>(instruction.operand[2])[lane];
  if (barrier.threads && barrier.pc != pc && barrier.expected == 0) {
    const std::string other = kernel.code[barrier.pc].source->where;
    machine().findings.report("warps wait for one barrier at different places", instruction,
                              [&] { return "warp " + std::to_string(warp.id) + " here, another at " + other; });
  }
  barrier.pc = pc;
  barrier.threads += kLanes;
  if (instruction.mode >= kCount) {
    const uint32_t predicate = warp.predicate(instruction.operand[3]);
    barrier.votes += uint32_t(__builtin_popcount(predicate & warp.live));
    barrier.voters += uint32_t(__builtin_popcount(warp.live));
  }
  for (size_t v = 0; v < warps.size(); ++v) barrier.clock[v] = std::max(barrier.clock[v], warp.clock[v]);
  if (instruction.mode == kArrive) {
    ++warp.clock[size_t(warp.id)];  // what comes now is not before the barrier
    for (Group& group : warp.groups) ++group.pc, group.parked = false;
    return;
  }
  barrier.highest = std::max(barrier.highest, warp.clock[size_t(warp.id)]);
  barrier.waiting.push_back(&warp);
  warp.at_barrier = true;
}

void Block::complete(Barrier& barrier) {
  // Raising each waiting warp's clock to the highest keeps clocks of warps that meet equal; Shadow relies on it.
  for (const Warp* warp : barrier.waiting) barrier.clock[size_t(warp->id)] = barrier.highest;
  for (Warp* warp : barrier.waiting) {
    const Instruction& instruction = kernel.code[warp->groups[0].pc];
    if (instruction.mode == kCount) {
      std::fill_n(warp->lanes<uint32_t>(instruction.operand[0]), kLanes, barrier.votes);
    } else if (instruction.mode > kCount) {
      const bool result = instruction.mode == kOr ? barrier.votes > 0 : barrier.votes == barrier.voters;
      warp->predicate(instruction.operand[0]) = result ? kAllLanes : 0;
    }
    for (size_t v = 0; v < warps.size(); ++v) warp->clock[v] = std::max(warp->clock[v], barrier.clock[v]);
    warp->clock[size_t(warp->id)] = barrier.highest + 1;
    warp->at_barrier = false;
    for (Group& group : warp->groups) ++group.pc, group.parked = false;
  }
  barrier = Barrier();
}

// Opens the barriers at which all have arrived. True: one opened.
bool Block::release() {
  uint32_t live_warps = 0;
  for (const Warp& warp : warps) live_warps += warp.live != 0;
  bool released = false;
  for (Barrier& barrier : barriers) {
    if (barrier.waiting.empty()) continue;
    const uint32_t expected = barrier.expected ? barrier.expected : live_warps * kLanes;
    if (barrier.threads < expected) continue;
    complete(barrier);
    released = true;
  }
  return released;
}

// ---- The block
// -------------------------------------------------------------------------------------------------------

void Block::check_end() {
  for (const Warp& warp : warps) {
    if (warp.copies.empty()) continue;
    const AsyncCopy& copy = warp.copies.front();
    machine().findings.report("cp.async never waited for", *copy.instruction,
                              [&] { return "thread " + std::to_string(warp.thread(copy.lane)); });
  }
}

void Block::run(Dimensions index_) {
  index = index_;
  executed_before = machine().executed;
  reset();
  for (;;) {
    bool ran = false, live = false;
    for (Warp& warp : warps) {
      if (!warp.live || warp.at_barrier) continue;
      ran |= run_warp(warp);
      if (warp.live) arrive(warp);
    }
    ran |= release();
    for (const Warp& warp : warps) live |= warp.live != 0;
    if (!live) break;
    if (ran) continue;
    const auto waiting = std::find_if(warps.begin(), warps.end(), [](const Warp& warp) { return warp.at_barrier; });
    const Barrier& barrier = barriers[waiting->lanes<uint32_t>(kernel.code[waiting->groups[0].pc].operand[1])[0]];
    fault(kernel.code[waiting->groups[0].pc], "barrier not reached by all: " + std::to_string(barrier.threads) +
                                                  " threads arrived, " + std::to_string(barrier.expected) +
                                                  " expected (0: all)");
  }
  if (machine().check) check_end();
}

static bool asks_for_blocks(const Kernel& kernel) {
  return std::any_of(kernel.presets.begin(), kernel.presets.end(), [](const Preset& preset) {
    return preset.kind == Preset::Kind::special && preset.value == kNctaidX;
  });
}

void launch(const Kernel& kernel, Dimensions grid, Dimensions block, uint32_t dynamic_shared, const void* parameters) {
  ++kernel.launches;
  if (asks_for_blocks(kernel)) grid.x = std::min(grid.x, machine().most_blocks);
  std::memcpy(const_cast<uint64_t*>(kernel.parameter_memory.data()), parameters, kernel.parameter_bytes);
  Block runner(kernel, grid, block, dynamic_shared);
  for (uint32_t z = 0; z < grid.z; ++z) {
    for (uint32_t y = 0; y < grid.y; ++y) {
      for (uint32_t x = 0; x < grid.x; ++x) runner.run({x, y, z});
    }
  }
}

}  // namespace ptxvm
