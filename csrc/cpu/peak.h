// What this machine can do at most, measured: register-only arithmetic loops and memory streams. The benchmarks print
// every kernel's speed as a percentage of these, so that figures carry over from one machine to another.
#pragma once

#include <string>
#include <vector>

namespace mha::cpu {

// The kinds that the instruction-set level in use has, of:
//   "fma_f32", "fma_f64"                  multiply-add on the level's widest vectors, in GF/s
//   "dot_bf16"                            vdpbf16ps on 512-bit vectors, in GF/s
//   "amx_bf16"                            tdpbf16ps on full tiles, in GF/s
//   "read_bandwidth", "write_bandwidth"   streams larger than the caches, in GB/s
std::vector<std::string> peak_kinds();

// Runs the loop of `kind` on `threads` threads at once for some tens of milliseconds and returns the rate of all of
// them together. Throws std::invalid_argument for a kind not in peak_kinds() and for threads
// outside [1, kMaxPeakThreads].
constexpr int kMaxPeakThreads = 1024;  // more than today's machines run at once
double measure_peak(const std::string& kind, int threads);

}  // namespace mha::cpu
