// One row of function pointers per instruction-set level: the only way into code compiled for a wide ISA.
#pragma once
#include <cstdint>

#include "../../core/attention.h"

namespace mha::cpu {

// A kernel cuts its problem into tasks that may run in any order and on any thread; what a task computes does not
// depend on how tasks are distributed, which is what makes results the same for every thread count.
template <class Problem>
struct Kernel {
  int64_t (*tasks)(const Problem&);
  void (*run)(const Problem&, int64_t begin, int64_t end);
};

struct KernelTable {
  const char* isa;
  Kernel<Product> product[kDTypes];
  Kernel<SoftmaxForward> softmax_forward[kDTypes];
  Kernel<SoftmaxBackward> softmax_backward[kDTypes];
  Kernel<Dropout> dropout[kDTypes];
  Kernel<SumOver> sum_over[kDTypes];
  Kernel<SumOver> sum_partials[kDTypes];
  Kernel<FusedForward> fused_forward[kDTypes];
  Kernel<FusedForward> fused_merge[kDTypes];
  Kernel<FusedBackward> fused_delta[kDTypes];
  Kernel<FusedBackward> fused_backward[kDTypes];
  Kernel<FusedBackward> fused_bias_backward[kDTypes];
};

}  // namespace mha::cpu
