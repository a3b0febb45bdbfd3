// Memory of the interpreted device: shared memory with a shadow that knows who touched what, and the ranges of global
// memory that may be touched.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "program.h"

namespace ptxvm {

enum class Access : uint8_t { read, write, atomic };

// Shared memory of the running block, between two pages that fault. One block runs at a time.
class SharedArena {
 public:
  static constexpr uint32_t kBytes = 256 << 10;
  SharedArena();
  uint8_t* base() const { return base_; }
  bool contains(uint64_t address) const { return address - reinterpret_cast<uint64_t>(base_) < kBytes; }
  uint32_t offset(uint64_t address) const { return uint32_t(address - reinterpret_cast<uint64_t>(base_)); }

 private:
  uint8_t* base_;
};

// State of one granule of shared memory. A clock counts the barriers a warp has passed (exec.h).
struct ShadowCell {
  uint32_t block = 0;        // number of the block that the rest of the cell speaks of
  uint32_t write_clock = 0;  // of the writer's warp
  uint32_t write_sync = 0;   // __syncwarp count of the writer's warp
  uint32_t read_clock = 0, read_sync = 0;
  uint32_t reader_warps = 0;         // that read since the last write
  int16_t writer = -1, reader = -1;  // threads
  int16_t copier = -1;               // thread whose cp.async is on its way here
  bool written = false, written_by_atomic = false;
};

class Shadow {
 public:
  // Granules of as many bytes as the kernel's narrowest access: no two threads' accesses meet in one by accident.
  void begin_block(uint32_t bytes, uint32_t smallest_access);
  // Checks one lane's access and records it. Within bounds: the caller has looked.
  void access(const Warp& warp, const Instruction& instruction, int lane, uint32_t offset, uint32_t bytes, Access kind);
  void copy_started(const Warp& warp, int lane, uint32_t offset, uint32_t bytes);
  void copy_landed(const Warp& warp, int lane, uint32_t offset, uint32_t bytes);

 private:
  void check_cell(ShadowCell& cell, const Warp& warp, const Instruction& instruction, int lane, Access kind);
  ShadowCell& fresh(uint32_t granule);
  std::vector<ShadowCell> cells_;
  uint32_t block_ = 0, shift_ = 0;
};

struct GlobalRange {
  uint64_t begin, end;
  bool writable;
  std::string name;
};

class GlobalRanges {
 public:
  void add(uint64_t begin, uint64_t bytes, bool writable, std::string name);
  void remove(uint64_t begin);
  void clear() { ranges_.clear(), last_ = 0; }
  // The range that holds all of the access, or null.
  const GlobalRange* find(uint64_t address, uint64_t bytes) const;
  // Where the address lies with respect to the nearest range, for messages.
  std::string describe(uint64_t address) const;

 private:
  std::vector<GlobalRange> ranges_;
  mutable size_t last_ = 0;  // most accesses fall where the last one did
};

// Checks one lane's access to global memory (or local memory or parameters by generic addresses). False: not allowed.
bool check_global(Warp& warp, const Instruction& instruction, int lane, uint64_t address, uint32_t bytes, Access kind);
// Checks the lanes' accesses and returns those lanes whose access may be carried out.
uint32_t check_accesses(Warp& warp, const Instruction& instruction, const uint64_t* address, uint32_t lanes,
                        uint32_t bytes, Access kind);

}  // namespace ptxvm
