// Execution of one block: warps in turn, all lanes of an instruction at once.
//
// Divergence: a warp is a set of groups (program counter, lanes). The group with the lowest program counter runs, and
// groups that meet at one merge: nvcc lays code out so that this reconverges. A group parks at a barrier, and at a
// .sync instruction until all lanes of its member mask are there.
//
// Order between warps: each warp has a vector clock. clock[v] = what it knows of warp v: accesses of v that v made
// while its own clock was at most that happened before. A barrier brings all its warps to the highest clock of each,
// then moves on by one.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "program.h"

namespace ptxvm {

struct Block;

constexpr int kMaxWarps = 32;
constexpr int kBarriers = 16;

struct Group {
  uint32_t pc, lanes;
  bool parked;
};

// A cp.async that has not landed: the bytes move when a wait completes its group, so that a missing wait shows.
struct AsyncCopy {
  uint32_t group;
  uint32_t destination;  // offset in shared memory
  uint64_t source;
  uint8_t lane, size, valid;  // `valid` bytes are copied, the rest is zero
  const Instruction* instruction;
};

struct Warp {
  Block* block = nullptr;
  uint8_t* registers = nullptr;
  int id = 0;
  uint32_t live = 0;  // lanes that have not exited
  std::vector<Group> groups;
  bool at_barrier = false;
  uint32_t sync_count = 0;  // of __syncwarp
  std::array<uint32_t, kMaxWarps> clock{};
  std::vector<AsyncCopy> copies;
  std::array<uint32_t, kLanes> committed{};  // groups of cp.async, by lane

  int thread(int lane) const { return id * kLanes + lane; }
  template <class T>
  T* lanes(uint32_t place) const {
    return reinterpret_cast<T*>(registers + place);
  }
  uint32_t& predicate(uint32_t place) const { return *lanes<uint32_t>(place); }
};

struct Dimensions {
  uint32_t x = 1, y = 1, z = 1;
  uint64_t volume() const { return uint64_t(x) * y * z; }
};

// A hardware barrier of the block. Threads are counted by whole warps.
struct Barrier {
  uint32_t threads = 0;                     // arrived
  uint32_t expected = 0;                    // 0: all threads that have not exited
  std::vector<Warp*> waiting;               // warps to release
  std::array<uint32_t, kMaxWarps> clock{};  // joined over all that arrived
  uint32_t highest = 0;                     // own clock of those
  uint32_t arrived_warps = 0;
  uint32_t votes = 0, voters = 0;  // bar.red
  uint32_t pc = 0;                 // of the first arrival
};

struct Block {
  const Kernel& kernel;
  Dimensions grid, block, index;
  uint32_t shared_bytes = 0, dynamic_shared_offset = 0;
  std::vector<uint64_t> register_memory, local_memory;
  std::vector<Warp> warps;
  std::array<Barrier, kBarriers> barriers;
  uint64_t executed_before = 0;  // instructions, when the block started

  Block(const Kernel& kernel, Dimensions grid, Dimensions block, uint32_t dynamic_shared);
  void run(Dimensions index);
  uint32_t threads() const { return uint32_t(block.volume()); }

 private:
  void reset();
  void fill_preset(Warp& warp, const Preset& preset);
  uint64_t special(const Warp& warp, int lane, uint64_t which) const;
  bool run_warp(Warp& warp);
  void run_group(Warp& warp, Group group);
  bool wake(Warp& warp);
  bool gather(Warp& warp, const Instruction& instruction, uint32_t pc, uint32_t& lanes);
  void arrive(Warp& warp);
  void join(Barrier& barrier, Warp& warp);
  bool release();
  void complete(Barrier& barrier);
  void check_end();
};

// Runs the whole grid. Throws Fault.
void launch(const Kernel& kernel, Dimensions grid, Dimensions block, uint32_t dynamic_shared, const void* parameters);

template <class Function>
__attribute__((always_inline)) inline void for_lanes(uint32_t lanes, Function&& function) {
  if (lanes == kAllLanes) {
#pragma GCC ivdep
    for (int lane = 0; lane < kLanes; ++lane) function(lane);
  } else {
    for (; lanes; lanes &= lanes - 1) function(__builtin_ctz(lanes));
  }
}

}  // namespace ptxvm
