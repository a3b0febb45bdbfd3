// The state of the interpreted device that outlives a launch, and its findings.
#pragma once
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

#include "memory.h"

namespace ptxvm {

// An error that ends the launch: execution cannot sensibly go on.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};
[[noreturn]] void fault(const Instruction& instruction, const std::string& message);

// Each kind of finding at each instruction once, with the number of times and the details of the first.
class Findings {
 public:
  // `details` is a function that returns text: called the first time only.
  template <class Details>
  void report(const char* kind, const Instruction& instruction, Details&& details) {
    Entry& entry = entries_[{kind, instruction.source}];
    if (entry.times++ == 0) entry.details = details();
  }
  void report(const std::string& message) { entries_[{message, nullptr}].times++; }
  std::string text() const;
  bool empty() const { return entries_.empty(); }
  void clear() { entries_.clear(); }

 private:
  struct Entry {
    uint64_t times = 0;
    std::string details;
  };
  std::map<std::pair<std::string, const Source*>, Entry> entries_;
};

struct Machine {
  bool check = true, statistics = false;
  bool any_memory = false;                          // global memory need not be registered
  int major = 9, minor = 0, multiprocessors = 132;  // what the launch code is told it runs on
  uint64_t executed = 0;                            // instructions, one for all lanes of a warp
  uint64_t limit = uint64_t{1} << 28;               // of instructions per block
  uint32_t most_blocks = UINT32_MAX;                // in x, of kernels that ask how many there are
  SharedArena arena;
  Shadow shadow;
  GlobalRanges ranges;     // what the caller has registered
  GlobalRanges variables;  // __device__ and __constant__ variables of the loaded modules
  Findings findings;
};

extern Machine the_machine;
inline Machine& machine() { return the_machine; }

}  // namespace ptxvm
