// Random masks, windows, offsets and lengths for the kernel tests, with the rule of visibility spelled out anew.
#pragma once
#include <limits>

#include "strided.h"

constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();

// Visibility with the tensors it points to.
struct Hidden {
  Stack<uint8_t> mask;
  std::vector<int64_t> offsets, lengths;
  Visibility visibility;

  void randomise(Random& random, const BatchShape& batch, int64_t rows, int64_t cols) {
    if (random.chance(0.6)) {
      mask = Stack<uint8_t>(random, batch, rows, cols, true);
      for (uint8_t& m : mask.storage) m = random.chance(0.7) ? random.pick<uint8_t>({1, 1, 2, 128, 255}) : 0;
      if (random.chance(0.2)) std::fill(mask.storage.begin(), mask.storage.end(), uint8_t{0});
      visibility.mask = mask.view;
    }
    if (random.chance(0.3)) visibility.window_left = random.integer(-2, cols);
    if (random.chance(0.3)) visibility.window_right = random.integer(-2, cols);
    if (random.chance(0.3)) visibility.causal_offset = random.integer(-3, 3);
    // One entry per outermost batch index.
    const auto per_batch = [&](std::vector<int64_t>& values, Input& input, int64_t from, int64_t to) {
      for (int64_t b = 0; b < batch.size[0]; ++b) values.push_back(random.integer(from, to));
      values.push_back(0);
      input.data = values.data();
      input.batch_stride[0] = 1;
    };
    if (random.chance(0.2)) per_batch(offsets, visibility.causal_offsets, -5, 5);
    if (random.chance(0.3)) per_batch(lengths, visibility.key_lengths, 0, cols);
  }

  // The rule, spelled out anew.
  bool visible(const BatchShape& batch, int64_t entry, int64_t i, int64_t j) {
    const int64_t b = entry / (batch.count() / batch.size[0]);
    const int64_t position = i + visibility.causal_offset + (offsets.empty() ? 0 : offsets[b]);
    if (visibility.window_left != INT64_MAX && j < position - visibility.window_left) return false;
    if (visibility.window_right != INT64_MAX && j > position + visibility.window_right) return false;
    if (!lengths.empty() && j >= lengths[b]) return false;
    return !visibility.mask || mask.at(entry, i, j);
  }
};
