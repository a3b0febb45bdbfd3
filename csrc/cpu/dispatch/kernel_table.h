// Function pointers for each instruction-set level and element type: the only way into code compiled for a wide ISA.
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

// For one element type.
struct TypeKernels {
  Kernel<Product> product;
  Kernel<SoftmaxForward> softmax_forward;
  Kernel<SoftmaxBackward> softmax_backward;
  Kernel<Dropout> dropout;
  Kernel<SumOver> sum_over;
  Kernel<SumOver> sum_partials;
  Kernel<FusedForward> fused_forward;
  Kernel<FusedForward> fused_merge;
  Kernel<FusedBackward> fused_delta;
  Kernel<FusedBackward> fused_delta_tiles;  // without the weights
  Kernel<FusedBackward> fused_backward;
  Kernel<FusedBackward> fused_bias_backward;
};

// Those of a level: its own, or those of the level below where it has nothing to add for a type.
struct KernelTable {
  const char* isa;
  const TypeKernels* types[kDTypes];

  const TypeKernels& of(DType dtype) const { return *types[static_cast<int>(dtype)]; }
};

}  // namespace mha::cpu
