#include "scratch.h"

#include <cstdlib>
#include <new>

namespace mha::cpu {
namespace {

constexpr std::size_t kAlignment = 64;  // a cache line and the widest vector

class Buffer {
 public:
  ~Buffer() { std::free(data); }

  void* at_least(std::size_t bytes) {
    if (bytes <= size) return data;
    std::free(data);
    const std::size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    data = std::aligned_alloc(kAlignment, rounded);
    size = data ? rounded : 0;
    if (!data) throw std::bad_alloc();
    return data;
  }

 private:
  void* data = nullptr;
  std::size_t size = 0;
};

}  // namespace

void* scratch(std::size_t bytes) {
  thread_local Buffer buffer;
  return buffer.at_least(bytes);
}

void* kept_scratch(std::size_t bytes) {
  thread_local Buffer buffer;
  return buffer.at_least(bytes);
}

}  // namespace mha::cpu
