#pragma once
#include "../cpu/dispatch/dispatch.h"
#include "stable_abi.h"

namespace mha::ops {

// Below this many scalar operations the threads' start costs more than they save. An estimate: one to ten
// microseconds of one core, and waking the others takes about as long.
constexpr double kSerialWork = 1e5;

// Runs every task of a kernel, on torch's own threads (torch.set_num_threads is honoured).
template <class Problem>
void launch(const cpu::Kernel<Problem>& kernel, const Problem& problem) {
  const int64_t tasks = kernel.tasks(problem);
  if (tasks == 0) return;
  if (tasks == 1 || problem.work() < kSerialWork) {
    kernel.run(problem, 0, tasks);
  } else {
    torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) { kernel.run(problem, begin, end); });
  }
}

template <class Problem>
void launch(const cpu::Kernel<Problem> (&kernels)[kDTypes], const Problem& problem) {
  launch(kernels[static_cast<int>(problem.dtype)], problem);
}

}  // namespace mha::ops
