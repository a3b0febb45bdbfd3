// The little that a plain C++ test program needs: CHECK with a message, a count of failures, a random generator, and
// the names and precisions of the element types.
#pragma once
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <utility>
#include <vector>

#include "../../csrc/core/problem.h"

namespace test {

inline std::atomic<int>& failures() {
  static std::atomic<int> count{0};
  return count;
}

// Prints and counts; the program goes on, so that one run shows every failure.
#define CHECK(condition, ...)                                       \
  do {                                                              \
    if (!(condition)) {                                             \
      if (++test::failures() <= 20) {                               \
        std::printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
        std::printf(__VA_ARGS__);                                   \
        std::printf("\n");                                          \
      }                                                             \
    }                                                               \
  } while (0)

// To be returned from main.
inline int summary(const char* name) {
  std::printf("%s: %s (%d failures)\n", name, failures() ? "FAILED" : "passed", failures().load());
  return failures() ? 1 : 0;
}

// SplitMix64 (Steele, Lea, Flood, 2014): the same numbers on every machine.
class Random {
 public:
  explicit Random(uint64_t seed = 1) : state_(seed) {}

  uint64_t bits() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
  int64_t integer(int64_t first, int64_t last) { return first + below(last - first + 1); }
  double uniform(double low, double high) { return low + (high - low) * 0x1p-53 * static_cast<double>(bits() >> 11); }
  bool chance(double p) { return uniform(0, 1) < p; }
  double normal() {  // Box and Muller, 1958
    const double radius = std::sqrt(-2 * std::log(1 - uniform(0, 1)));
    return radius * std::cos(uniform(0, 6.283185307179586));
  }
  template <class T>
  T pick(std::initializer_list<T> choices) {
    return choices.begin()[below(static_cast<int64_t>(choices.size()))];
  }
  template <class T>
  void shuffle(std::vector<T>& x) {  // Fisher and Yates
    for (size_t n = x.size(); n > 1; --n) std::swap(x[n - 1], x[static_cast<size_t>(below(static_cast<int64_t>(n)))]);
  }

 private:
  uint64_t state_;
};

inline const char* name_of(mha::DType dtype) {
  constexpr const char* names[] = {"f64", "f32", "bf16", "f16"};
  return names[static_cast<int>(dtype)];
}

// Spacing of the numbers of `dtype` at 1.
inline double epsilon(mha::DType dtype) {
  constexpr double spacing[] = {0x1p-52, 0x1p-23, 0x1p-7, 0x1p-10};
  return spacing[static_cast<int>(dtype)];
}

}  // namespace test
