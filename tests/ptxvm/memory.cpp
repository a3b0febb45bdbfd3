#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "exec.h"
#include "machine.h"

namespace ptxvm {

SharedArena::SharedArena() {
  const size_t page = size_t(sysconf(_SC_PAGESIZE));
  void* all = mmap(nullptr, kBytes + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED) throw std::bad_alloc();
  base_ = static_cast<uint8_t*>(all) + page;
  mprotect(base_, kBytes, PROT_READ | PROT_WRITE);
}

// ---- Shadow
// ----------------------------------------------------------------------------------------------------------

// `reader` holds this where several lanes of a warp have read since its last __syncwarp.
static int16_t several_lanes_of(int warp) { return int16_t(-2 - warp); }

static std::string threads_text(int a, int b) {
  const std::string other = b >= 0 ? "thread " + std::to_string(b) : "several lanes of warp " + std::to_string(-2 - b);
  return "thread " + std::to_string(a) + " and " + other;
}

static std::string block_text(const Warp& warp) {
  const Dimensions& i = warp.block->index;
  return " of block (" + std::to_string(i.x) + ", " + std::to_string(i.y) + ", " + std::to_string(i.z) + ")";
}

void Shadow::begin_block(uint32_t bytes, uint32_t smallest_access) {
  shift_ = uint32_t(__builtin_ctz(smallest_access));
  const size_t granules = (size_t(bytes) >> shift_) + 1;
  if (cells_.size() < granules) cells_.resize(granules);
  if (++block_ == 0) cells_.assign(cells_.size(), ShadowCell()), block_ = 1;
}

inline ShadowCell& Shadow::fresh(uint32_t granule) {
  ShadowCell& cell = cells_[granule];
  if (cell.block != block_) cell = ShadowCell(), cell.block = block_;
  return cell;
}

static bool written_before(const ShadowCell& cell, const Warp& warp, int thread) {
  const int writer_warp = cell.writer / kLanes;
  if (writer_warp != warp.id) return warp.clock[writer_warp] >= cell.write_clock;
  return cell.writer == thread || cell.write_clock < warp.clock[warp.id] || cell.write_sync < warp.sync_count;
}

// Whether all reads but the thread's own happened before what the warp does now.
static bool read_before(const ShadowCell& cell, const Warp& warp, int thread) {
  for (uint32_t others = cell.reader_warps & ~(1u << warp.id); others; others &= others - 1) {
    if (warp.clock[__builtin_ctz(others)] < cell.read_clock) return false;
  }
  const int reader_warp = cell.reader >= 0 ? cell.reader / kLanes : -2 - cell.reader;
  if (cell.reader_warps == 0 || reader_warp != warp.id || cell.reader == thread) return true;
  return cell.read_clock < warp.clock[warp.id] || cell.read_sync < warp.sync_count;
}

static void record_read(ShadowCell& cell, const Warp& warp, int thread) {
  const uint32_t now = warp.clock[warp.id];
  const bool same_moment = cell.read_clock == now && cell.read_sync == warp.sync_count;
  const bool same_warp = cell.reader >= 0 ? cell.reader / kLanes == warp.id : cell.reader == several_lanes_of(warp.id);
  if (cell.read_clock != now && read_before(cell, warp, thread)) cell.reader_warps = 0;
  if (same_warp && same_moment && cell.reader != thread && cell.reader_warps) {
    cell.reader = several_lanes_of(warp.id);
  } else {
    cell.reader = int16_t(thread);
  }
  cell.reader_warps |= 1u << warp.id;
  cell.read_clock = std::max(cell.read_clock, now);
  cell.read_sync = warp.sync_count;
}

inline void Shadow::check_cell(ShadowCell& cell, const Warp& warp, const Instruction& instruction, int lane,
                               Access kind) {
  const int thread = warp.thread(lane);
  Findings& findings = machine().findings;
  if (cell.copier >= 0) {
    findings.report("access to the destination of an unfinished cp.async", instruction, [&] {
      return "thread " + std::to_string(thread) + block_text(warp) + ", copy by thread " + std::to_string(cell.copier);
    });
  }
  const bool both_atomic = kind == Access::atomic && cell.written_by_atomic;
  if (cell.writer >= 0 && !both_atomic && !written_before(cell, warp, thread)) {
    findings.report(kind == Access::read ? "race: read after write" : "race: write after write", instruction,
                    [&] { return threads_text(thread, cell.writer) + block_text(warp); });
  }
  if (kind != Access::read && !read_before(cell, warp, thread)) {
    findings.report("race: write after read", instruction,
                    [&] { return threads_text(thread, cell.reader) + block_text(warp); });
  }
  if (kind != Access::write && !cell.written && cell.copier < 0) {
    findings.report("read of uninitialised shared memory", instruction,
                    [&] { return "thread " + std::to_string(thread) + block_text(warp); });
  }
}

static void record_write(ShadowCell& cell, const Warp& warp, int thread, bool atomic) {
  cell.written = true;
  cell.writer = int16_t(thread);
  cell.write_clock = warp.clock[warp.id];
  cell.write_sync = warp.sync_count;
  cell.written_by_atomic = atomic;
  cell.reader_warps = 0;
}

// Whether a read would find and record what is known: the thread's warp has read the cell since it was written and
// since its last barrier. Of threads of the writer's own warp each has to be looked at.
static bool is_read_again(const ShadowCell& cell, const Warp& warp, int thread) {
  const bool read_here = cell.reader_warps >> warp.id & 1 && cell.read_clock == warp.clock[warp.id] &&
                         cell.read_sync == warp.sync_count && cell.written && cell.copier < 0;
  return read_here &&
         (cell.reader == thread || (cell.reader == several_lanes_of(warp.id) && cell.writer / kLanes != warp.id));
}

void Shadow::access(const Warp& warp, const Instruction& instruction, int lane, uint32_t offset, uint32_t bytes,
                    Access kind) {
  for (uint32_t granule = offset >> shift_; granule <= (offset + bytes - 1) >> shift_; ++granule) {
    ShadowCell& cell = fresh(granule);
    if (kind == Access::read && is_read_again(cell, warp, warp.thread(lane))) continue;
    check_cell(cell, warp, instruction, lane, kind);
    if (kind == Access::read) {
      record_read(cell, warp, warp.thread(lane));
    } else {
      record_write(cell, warp, warp.thread(lane), kind == Access::atomic);
    }
  }
}

void Shadow::copy_started(const Warp& warp, int lane, uint32_t offset, uint32_t bytes) {
  for (uint32_t granule = offset >> shift_; granule <= (offset + bytes - 1) >> shift_; ++granule) {
    fresh(granule).copier = int16_t(warp.thread(lane));
  }
}

void Shadow::copy_landed(const Warp& warp, int lane, uint32_t offset, uint32_t bytes) {
  for (uint32_t granule = offset >> shift_; granule <= (offset + bytes - 1) >> shift_; ++granule) {
    ShadowCell& cell = fresh(granule);
    cell.copier = -1;
    record_write(cell, warp, warp.thread(lane), false);
  }
}

// ---- Global memory
// ---------------------------------------------------------------------------------------------------

void GlobalRanges::add(uint64_t begin, uint64_t bytes, bool writable, std::string name) {
  ranges_.push_back({begin, begin + bytes, writable, std::move(name)});
}

void GlobalRanges::remove(uint64_t begin) {
  const auto here = [&](const GlobalRange& range) { return range.begin == begin; };
  const auto found = std::find_if(ranges_.begin(), ranges_.end(), here);
  if (found != ranges_.end()) ranges_.erase(found);
  last_ = 0;
}

const GlobalRange* GlobalRanges::find(uint64_t address, uint64_t bytes) const {
  const auto holds = [&](const GlobalRange& range) { return address >= range.begin && address + bytes <= range.end; };
  if (last_ < ranges_.size() && holds(ranges_[last_])) return &ranges_[last_];
  for (size_t i = 0; i < ranges_.size(); ++i) {
    if (holds(ranges_[i])) return last_ = i, &ranges_[i];
  }
  return nullptr;
}

std::string GlobalRanges::describe(uint64_t address) const {
  if (ranges_.empty()) return "no memory is registered";
  const GlobalRange* nearest = nullptr;
  uint64_t distance = ~uint64_t{0};
  for (const GlobalRange& range : ranges_) {
    const uint64_t here = address < range.begin  ? range.begin - address
                          : address >= range.end ? address - range.end
                                                 : 0;
    if (here < distance) distance = here, nearest = &range;
  }
  const std::string name = nearest->name.empty() ? "a registered range" : "'" + nearest->name + "'";
  if (address >= nearest->end) return std::to_string(distance) + " bytes after the end of " + name;
  if (address < nearest->begin) return std::to_string(distance) + " bytes before " + name;
  return "across the end of " + name + " at byte " + std::to_string(address - nearest->begin);
}

// ---- Checks of an instruction
// ----------------------------------------------------------------------------------------

static bool lies_in(const std::vector<uint64_t>& memory, uint64_t address, uint32_t bytes) {
  const uint64_t begin = reinterpret_cast<uint64_t>(memory.data());
  return address >= begin && address + bytes <= begin + memory.size() * sizeof(uint64_t);
}

static bool check_shared(Warp& warp, const Instruction& instruction, int lane, uint64_t address, uint32_t bytes,
                         Access kind) {
  Machine& m = machine();
  const int64_t offset = int64_t(address - reinterpret_cast<uint64_t>(m.arena.base()));
  if (offset < 0 || offset + bytes > int64_t(warp.block->shared_bytes)) {
    m.findings.report("shared memory access out of bounds", instruction, [&] {
      return "thread " + std::to_string(warp.thread(lane)) + block_text(warp) + ", bytes " + std::to_string(offset) +
             " to " + std::to_string(offset + bytes - 1) + " of " + std::to_string(warp.block->shared_bytes);
    });
    return false;
  }
  m.shadow.access(warp, instruction, lane, uint32_t(offset), bytes, kind);
  return true;
}

bool check_global(Warp& warp, const Instruction& instruction, int lane, uint64_t address, uint32_t bytes, Access kind) {
  Machine& m = machine();
  if (lies_in(warp.block->local_memory, address, bytes)) return true;
  if (kind == Access::read && lies_in(warp.block->kernel.parameter_memory, address, bytes)) return true;
  const GlobalRange* range = m.ranges.find(address, bytes);
  if (!range) range = m.variables.find(address, bytes);
  if (!range && m.any_memory) return true;
  const auto who = [&] { return "thread " + std::to_string(warp.thread(lane)) + block_text(warp) + ", "; };
  if (!range) {
    m.findings.report("global memory access out of bounds", instruction,
                      [&] { return who() + std::to_string(bytes) + " bytes, " + m.ranges.describe(address); });
    return false;
  }
  if (kind != Access::read && !range->writable) {
    m.findings.report("write to read-only memory", instruction, [&] { return who() + "'" + range->name + "'"; });
    return false;
  }
  return true;
}

uint32_t check_accesses(Warp& warp, const Instruction& instruction, const uint64_t* address, uint32_t lanes,
                        uint32_t bytes, Access kind) {
  Machine& m = machine();
  uint32_t allowed = 0;
  for (uint32_t rest = lanes; rest; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    if (address[lane] % bytes) {
      m.findings.report("misaligned access", instruction, [&] {
        return "thread " + std::to_string(warp.thread(lane)) + block_text(warp) + ", " + std::to_string(bytes) +
               " bytes at an address that is " + std::to_string(address[lane] % bytes) + " beyond a multiple";
      });
    }
    const bool in_shared = instruction.space == Space::shared || m.arena.contains(address[lane]);
    const auto check = in_shared ? check_shared : check_global;
    if (check(warp, instruction, lane, address[lane], bytes, kind)) allowed |= 1u << lane;
  }
  return allowed;
}

}  // namespace ptxvm
