// The little that a plain C++ test program needs: CHECK with a message, a count of failures, a random generator, and
// buffers of the four element types that are filled and read as double.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include "../../csrc/core/half.h"
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
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t bits() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
  double uniform(double low, double high) { return low + (high - low) * 0x1p-53 * static_cast<double>(bits() >> 11); }
  template <class T>
  T pick(std::initializer_list<T> choices) {
    return choices.begin()[below(static_cast<int64_t>(choices.size()))];
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

// Elements of one dtype, in exactly as many bytes as they need, so that AddressSanitizer sees every step outside.
class Buffer {
 public:
  Buffer(mha::DType dtype, int64_t size) : dtype_(dtype), size_(size), bytes_(size * width(dtype)) {}

  static int64_t width(mha::DType dtype) { return dtype == mha::DType::f64 ? 8 : dtype == mha::DType::f32 ? 4 : 2; }
  int64_t size() const { return size_; }
  void* data() { return bytes_.data(); }
  const void* data() const { return bytes_.data(); }

  double get(int64_t i) const {
    switch (dtype_) {
      case mha::DType::f64: return at<double>(i);
      case mha::DType::f32: return static_cast<double>(at<float>(i));
      case mha::DType::bf16: return static_cast<double>(mha::widen(at<mha::bfloat16>(i)));
      default: return static_cast<double>(mha::widen(at<mha::float16>(i)));
    }
  }
  void set(int64_t i, double x) {
    switch (dtype_) {
      case mha::DType::f64: put<double>(i, x); break;
      case mha::DType::f32: put<float>(i, static_cast<float>(x)); break;
      case mha::DType::bf16: put<mha::bfloat16>(i, mha::narrow<mha::bfloat16>(static_cast<float>(x))); break;
      default: put<mha::float16>(i, mha::narrow<mha::float16>(static_cast<float>(x))); break;
    }
  }
  void fill_uniform(Random& random, double low = -1.0, double high = 1.0) {
    for (int64_t i = 0; i < size_; ++i) set(i, random.uniform(low, high));
  }

 private:
  template <class T>
  T at(int64_t i) const {
    T x;
    std::memcpy(&x, bytes_.data() + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    return x;
  }
  template <class T>
  void put(int64_t i, T x) {
    std::memcpy(bytes_.data() + i * static_cast<int64_t>(sizeof(T)), &x, sizeof(T));
  }

  mha::DType dtype_;
  int64_t size_;
  std::vector<unsigned char> bytes_;
};

}  // namespace test
