#include "scratch.h"

#include <cstdlib>
#include <new>

namespace mha::cpu {
namespace {

constexpr std::size_t kAlignment = 64;  // a cache line and the widest vector

struct Buffer {
  void* data = nullptr;
  std::size_t bytes = 0;
  ~Buffer() { std::free(data); }
};

}  // namespace

void* scratch(std::size_t bytes) {
  thread_local Buffer buffer;
  if (bytes > buffer.bytes) {
    std::free(buffer.data);
    const std::size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    buffer.data = std::aligned_alloc(kAlignment, rounded);
    buffer.bytes = buffer.data ? rounded : 0;
    if (!buffer.data) throw std::bad_alloc();
  }
  return buffer.data;
}

}  // namespace mha::cpu
