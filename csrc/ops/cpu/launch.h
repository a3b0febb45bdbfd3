#pragma once
#include <atomic>

#include "../../cpu/dispatch/dispatch.h"
#include "../stable_abi.h"

namespace mha::ops {

// Below this many scalar operations the threads' start costs more than they save. An estimate: one to ten
// microseconds of one core, and waking the others takes about as long.
constexpr double kSerialWork = 1e5;

template <class Problem>
bool is_serial(const Problem& problem, int64_t tasks) {
  return tasks <= 1 || problem.work() < kSerialWork;
}

// Runs every task of a kernel, on torch's own threads (torch.set_num_threads is honoured).
template <class Problem>
void launch(const cpu::Kernel<Problem>& kernel, const Problem& problem) {
  const int64_t tasks = kernel.tasks(problem);
  if (tasks == 0) return;
  if (is_serial(problem, tasks)) {
    kernel.run(problem, 0, tasks);
  } else {
    torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) { kernel.run(problem, begin, end); });
  }
}

// The same for tasks of unlike length: torch would cut their range into equal parts and wait for the slowest, so here
// each thread takes the next task as soon as it is free. (With causality the forward numbers the longest of a head
// first.) What throws (only scratch() may, without memory) throws through torch, which brings it to the calling thread.
template <class Problem>
void launch_one_by_one(const cpu::Kernel<Problem>& kernel, const Problem& problem) {
  const int64_t tasks = kernel.tasks(problem);
  if (tasks == 0) return;
  if (is_serial(problem, tasks)) return kernel.run(problem, 0, tasks);
  std::atomic<int64_t> next{0};
  const auto work = [&](int64_t, int64_t) {
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;)
      kernel.run(problem, task, task + 1);
  };
  const int64_t threads = torch::stable::get_num_threads();
  torch::stable::parallel_for(0, threads < tasks ? threads : tasks, 1, work);
}

template <class Problem>
void launch(cpu::Kernel<Problem> cpu::TypeKernels::* kernel, const Problem& problem) {
  launch(cpu::kernels().of(problem.dtype).*kernel, problem);
}
template <class Problem>
void launch_one_by_one(cpu::Kernel<Problem> cpu::TypeKernels::* kernel, const Problem& problem) {
  launch_one_by_one(cpu::kernels().of(problem.dtype).*kernel, problem);
}

}  // namespace mha::ops
