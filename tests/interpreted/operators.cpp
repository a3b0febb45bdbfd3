// The operators as torch.ops.mha_ext_ptxvm.*, on CPU tensors: their CUDA kernels, launched as on a GPU, run in the PTX
// interpreter (tests/ptxvm), which knows of each tensor's memory what belongs to it.
#include <cstring>

#include "../../csrc/ops/cuda/keep_mask.h"
#include "../../csrc/ops/cuda/kernels_on_stream.h"
#include "../../csrc/ops/operators/baseline.h"
#include "../../csrc/ops/operators/schemas.h"
#include "../ptxvm/api.h"

namespace mha::ops {
namespace {

struct Interpreter : KernelsOnStream<Interpreter> {
  // What an operator works on is registered while it works.
  struct Scope {
    explicit Scope(const Tensor& first) { expose("the first tensor", first, false); }
    ~Scope() {
      for (const void* memory : exposed()) ptxvm_unregister(memory);
      exposed().clear();
    }
  };

  static void require_here(const char* name, const Tensor& t) {
    require(t.is_cpu(), name, " must be a CPU tensor like the others");
    expose(name, t, std::strcmp(name, "out") == 0);
  }

  // Results start as NaN, so that what no kernel writes shows.
  static Tensor allocate(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides, ScalarType type) {
    AtenTensorHandle handle;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(), strides.data(),
                                                    static_cast<int32_t>(type), aoti_torch_device_type_cpu(), 0,
                                                    &handle));
    Tensor t(handle);
    std::memset(t.mutable_data_ptr(), 0xFF, static_cast<size_t>(t.numel() * t.element_size()));
    expose("a result", t, true);
    return t;
  }

  static cudaStream_t stream() { return nullptr; }

  static double keep_mask(const Tensor& mask, const Tensor& keep) {
    check("keep_mask", cuda::keep_mask(keep_mask_problem(mask, keep), stream()));
    return 0;
  }

 private:
  static std::vector<const void*>& exposed() {
    static std::vector<const void*> memory;
    return memory;
  }
  static void expose(const char* name, const Tensor& t, bool writable) {
    const void* memory = t.const_data_ptr();
    const auto bytes = static_cast<uint64_t>(extent(t) * t.element_size());
    if (bytes == 0 || (!writable && ptxvm_is_registered(memory, bytes))) return;
    ptxvm_register(memory, bytes, writable, name);
    exposed().push_back(memory);
  }
};

using Device = Interpreter;
#include "../../csrc/ops/operators/all.inl"

}  // namespace
}  // namespace mha::ops

STABLE_TORCH_LIBRARY(mha_ext_ptxvm, m) { mha::ops::define_all(m); }
STABLE_TORCH_LIBRARY_IMPL(mha_ext_ptxvm, CPU, m) { mha::ops::implement_all(m); }
