#include "peak.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <thread>

#include "dispatch/dispatch.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace mha::cpu {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Runs work(thread) on `threads` threads that start together; returns the time until the last one is done.
double time_together(int threads, const std::function<void(int)>& work) {
  enum class Signal { wait, go, give_up };
  std::atomic<int> ready{0};
  std::atomic<Signal> signal{Signal::wait};
  std::vector<std::thread> pool;
  const auto finish = [&](Signal how) {
    signal = how;
    for (std::thread& worker : pool) worker.join();
  };
  try {
    for (int thread = 0; thread < threads; ++thread) {
      pool.emplace_back([&, thread] {
        ++ready;
        while (signal == Signal::wait) std::this_thread::yield();
        if (signal == Signal::go) work(thread);
      });
    }
  } catch (...) {  // the system has no more threads; destroying a running one would end the process
    finish(Signal::give_up);
    throw;
  }
  while (ready < threads) std::this_thread::yield();
  const Clock::time_point start = Clock::now();
  finish(Signal::go);
  return seconds_since(start);
}

#if defined(__x86_64__)

// One instruction on twelve accumulators: each waits only for itself, and 12 chains cover a latency of 4 to 6 cycles on
// two ports. Written as one assembly block, loop included, because a compiler is free to merge or drop chains written
// in C++ whose results nobody reads. Registers 13 and 14 are the factors; all are zero, which no vector unit computes
// faster.
#define MHA_TWELVE_CHAINS(instruction, width)                                                                          \
  void chains_##instruction##_##width(int64_t rounds) {                                                                \
    asm volatile(                                                                                                      \
        "vzeroall\n"                                                                                                   \
        "1:\n"                                                                                                         \
        ".irp chain,0,1,2,3,4,5,6,7,8,9,10,11\n" #instruction " %%" #width "mm13, %%" #width "mm14, %%" #width         \
        "mm\\chain\n"                                                                                                  \
        ".endr\n"                                                                                                      \
        "decq %0\n"                                                                                                    \
        "jnz 1b\n"                                                                                                     \
        "vzeroupper\n"                                                                                                 \
        : "+r"(rounds)::"cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", \
          "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");                                                                \
  }

MHA_TWELVE_CHAINS(vfmadd231ps, z)
MHA_TWELVE_CHAINS(vfmadd231ps, y)
MHA_TWELVE_CHAINS(vfmadd231pd, z)
MHA_TWELVE_CHAINS(vfmadd231pd, y)
MHA_TWELVE_CHAINS(vdpbf16ps, z)
#undef MHA_TWELVE_CHAINS

// The layout that ldtilecfg reads (Intel SDM, "TILECFG").
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Six accumulator tiles; tiles 6 and 7 are the factors. Compilers never keep anything in tiles, so none is clobbered.
void chains_tdpbf16ps(int64_t rounds) {
  const TileConfig config;
  asm volatile(
      "ldtilecfg %1\n"
      ".irp tile,0,1,2,3,4,5,6,7\n"
      "tilezero %%tmm\\tile\n"
      ".endr\n"
      "1:\n"
      ".irp tile,0,1,2,3,4,5\n"
      "tdpbf16ps %%tmm6, %%tmm7, %%tmm\\tile\n"
      ".endr\n"
      "decq %0\n"
      "jnz 1b\n"
      "tilerelease\n"
      : "+r"(rounds)
      : "m"(config)
      : "cc");
}

#endif  // __x86_64__

// A register-only loop and the floating-point operations of one round of it.
struct Loop {
  std::string kind;
  void (*run)(int64_t rounds);
  double flops_per_round;
};

std::vector<Loop> loops() {
  std::vector<Loop> found;
#if defined(__x86_64__)
  const Isa isa = isa_in_use();
  // chains x lanes x (multiply and add)
  if (isa >= Isa::avx512) {
    found.push_back({"fma_f32", chains_vfmadd231ps_z, 12 * 16 * 2});
    found.push_back({"fma_f64", chains_vfmadd231pd_z, 12 * 8 * 2});
  } else if (isa >= Isa::avx2) {
    found.push_back({"fma_f32", chains_vfmadd231ps_y, 12 * 8 * 2});
    found.push_back({"fma_f64", chains_vfmadd231pd_y, 12 * 4 * 2});
  }
  if (isa >= Isa::avx512_bf16) found.push_back({"dot_bf16", chains_vdpbf16ps_z, 12 * 32 * 2});
  if (isa >= Isa::amx_bf16) found.push_back({"amx_bf16", chains_tdpbf16ps, 6 * 16 * 16 * 32 * 2});
#endif
  return found;
}

double loop_rate(const Loop& loop, int threads) {
  constexpr double kSeconds = 0.01;
  constexpr int kTrials = 3;
  const auto time_of = [&](int64_t rounds) { return time_together(threads, [&](int) { loop.run(rounds); }); };
  int64_t rounds = 1000;
  double seconds = time_of(rounds);
  while (seconds < kSeconds) {
    rounds *= 2;
    seconds = time_of(rounds);
  }
  for (int trial = 1; trial < kTrials; ++trial) seconds = std::min(seconds, time_of(rounds));
  return loop.flops_per_round * static_cast<double>(rounds) * threads / seconds * 1e-9;
}

using Vector = float __attribute__((vector_size(16)));

void read_all(const float* data, std::size_t count) {
  constexpr std::size_t kSums = 8, kLanes = sizeof(Vector) / sizeof(float);
  const Vector* const vectors = reinterpret_cast<const Vector*>(data);
  Vector sums[kSums] = {};
  for (std::size_t i = 0; i + kSums <= count / kLanes; i += kSums) {
    for (std::size_t chain = 0; chain < kSums; ++chain) sums[chain] += vectors[i + chain];
  }
  asm volatile("" : : "r"(sums) : "memory");  // the sums are wanted, so the loads are
}

// Stores that bypass the caches where the CPU has them: a plain store reads each line before it writes it.
void write_all(float* data, std::size_t count) {
#if defined(__x86_64__)
  const __m128 ones = _mm_set1_ps(1.0f);
  for (std::size_t i = 0; i < count; i += 4) _mm_stream_ps(data + i, ones);
  _mm_sfence();
#else
  std::fill(data, data + count, 1.0f);
#endif
}

double stream_rate(bool write, int threads) {
  constexpr std::size_t kCount = std::size_t{1} << 27;  // 512 MiB of floats: more than any last-level cache
  constexpr int kTrials = 3;
  const std::size_t share = kCount / static_cast<std::size_t>(threads) / 64 * 64;
  std::vector<float> buffer(kCount + 16);
  // Cache line boundary: what _mm_stream_ps asks for, and no line is shared by two threads.
  float* const data = buffer.data() + (64 - reinterpret_cast<std::uintptr_t>(buffer.data()) % 64) % 64 / sizeof(float);
  const auto stream = [&](int thread) {
    float* const part = data + static_cast<std::size_t>(thread) * share;
    if (write) write_all(part, share);
    else read_all(part, share);
  };
  double seconds = time_together(threads, stream);
  for (int trial = 1; trial < kTrials; ++trial) seconds = std::min(seconds, time_together(threads, stream));
  return static_cast<double>(share * sizeof(float)) * threads / seconds * 1e-9;
}

}  // namespace

std::vector<std::string> peak_kinds() {
  std::vector<std::string> kinds;
  for (const Loop& loop : loops()) kinds.push_back(loop.kind);
  kinds.push_back("read_bandwidth");
  kinds.push_back("write_bandwidth");
  return kinds;
}

double measure_peak(const std::string& kind, int threads) {
  if (threads < 1 || threads > kMaxPeakThreads) {
    throw std::invalid_argument("threads must lie in [1, " + std::to_string(kMaxPeakThreads) + "], got " +
                                std::to_string(threads));
  }
  if (kind == "read_bandwidth" || kind == "write_bandwidth") return stream_rate(kind == "write_bandwidth", threads);
  std::string known = "read_bandwidth, write_bandwidth";
  for (const Loop& loop : loops()) {
    if (loop.kind == kind) return loop_rate(loop, threads);
    known = loop.kind + ", " + known;
  }
  throw std::invalid_argument("kind must be one of " + known + ", got '" + kind + "'");
}

}  // namespace mha::cpu
