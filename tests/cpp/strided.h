// Random matrices behind random strides for the kernel tests, and how to run a kernel.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "../../csrc/core/half.h"
#include "../../csrc/core/problem.h"
#include "../../csrc/core/strides.h"
#include "../../csrc/cpu/dispatch/dispatch.h"
#include "check.h"

using namespace mha;
using test::Random;

template <class T>
constexpr DType kDType = std::is_same_v<T, double>     ? DType::f64
                         : std::is_same_v<T, float>    ? DType::f32
                         : std::is_same_v<T, bfloat16> ? DType::bf16
                                                       : DType::f16;
template <class T>
constexpr double kTiny = std::is_same_v<T, float16>  ? 0x1p-24
                         : std::is_same_v<T, double> ? 1e-300
                                                     : 1e-37;  // underflow

// Spacing of the numbers of T at 1.
template <class T>
double epsilon() {
  return test::epsilon(kDType<T>);
}

// Storage of a stack of matrices: batch dimensions, rows, columns in random order in memory, with gaps; and for inputs
// at random broadcast along some of them.
template <class T>
struct Stack {
  BatchShape batch;
  int64_t rows = 0, cols = 0;
  std::vector<T> storage;
  Input view;

  Stack() = default;
  Stack(Random& random, const BatchShape& shape, int64_t n_rows, int64_t n_cols, bool may_broadcast)
      : batch(shape), rows(n_rows), cols(n_cols) {
    std::vector<int64_t> sizes(shape.size, shape.size + shape.ndim);
    sizes.push_back(n_rows);
    sizes.push_back(n_cols);
    std::vector<int> order(sizes.size());
    std::iota(order.begin(), order.end(), 0);
    if (random.chance(0.5)) random.shuffle(order);
    std::vector<int64_t> strides(sizes.size());
    int64_t step = random.chance(0.7) ? 1 : random.integer(2, 3);
    for (size_t k = order.size(); k-- > 0;) {
      const int d = order[k];
      if (may_broadcast && random.chance(0.2)) continue;
      strides[d] = step;
      step = step * std::max<int64_t>(sizes[d], 1) + (random.chance(0.3) ? random.integer(1, 5) : 0);
    }
    storage.resize(static_cast<size_t>(step));
    std::copy(strides.begin(), strides.end() - 2, view.batch_stride);
    view.row_stride = strides[shape.ndim];
    view.col_stride = strides[shape.ndim + 1];
    view.data = storage.data();
  }
  Stack(const Stack& other) { *this = other; }
  Stack& operator=(const Stack& other) {
    batch = other.batch, rows = other.rows, cols = other.cols, storage = other.storage, view = other.view;
    view.data = storage.data();
    return *this;
  }

  T& at(int64_t entry, int64_t i, int64_t j) {
    return storage[static_cast<size_t>(batch_offset(batch, entry, view.batch_stride) + i * view.row_stride +
                                       j * view.col_stride)];
  }
  double value(int64_t entry, int64_t i, int64_t j) { return static_cast<double>(widen(at(entry, i, j))); }
  void set(int64_t entry, int64_t i, int64_t j, double x) {
    at(entry, i, j) = narrow<T>(static_cast<accumulate_t<T>>(x));
  }
  Output output() {
    Output o;
    o.data = storage.data();
    std::copy(view.batch_stride, view.batch_stride + kMaxBatchDims, o.batch_stride);
    o.row_stride = view.row_stride;
    o.col_stride = view.col_stride;
    return o;
  }
  void fill_normal(Random& random, double scale) {
    for (T& x : storage) x = narrow<T>(static_cast<accumulate_t<T>>(scale * random.normal()));
  }
  bool same_bytes(const Stack& other) const {
    return storage.size() == other.storage.size() &&
           (storage.empty() || std::memcmp(storage.data(), other.storage.data(), storage.size() * sizeof(T)) == 0);
  }
};

// Runs the tasks in pieces, last piece first: what a task computes must depend on nothing but the task.
template <class Problem>
void run_in_pieces(Random& random, const cpu::Kernel<Problem>& kernel, const Problem& p) {
  for (int64_t end = kernel.tasks(p); end > 0;) {
    const int64_t begin = std::max<int64_t>(0, end - random.integer(1, 3));
    kernel.run(p, begin, end);
    end = begin;
  }
}

inline BatchShape random_batch(Random& random) {
  BatchShape b;
  b.ndim = static_cast<int>(random.integer(1, 3));
  for (int d = 0; d < b.ndim; ++d) b.size[d] = random.chance(0.05) ? 0 : random.integer(1, 3);
  return b;
}

inline int64_t random_size(Random& random) {
  const int64_t sizes[] = {0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 100, 197};
  return random.chance(0.03) ? random.integer(600, 3000) : sizes[random.integer(0, 13)];
}
