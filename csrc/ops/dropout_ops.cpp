// Dropout on CPU.
#include "allocate.h"
#include "dropout_arguments.h"
#include "launch.h"

namespace mha::ops {
namespace {

Tensor dropout(const Tensor& weights, const Tensor& seed, double p) {
  require_matrices("weights", weights);
  require_probability("p", p);
  Dropout problem;
  problem.dtype = dtype_of("weights", weights);
  problem.batch = batch_shape(weights, 2);
  problem.rows = weights.size(problem.batch.ndim);
  problem.cols = weights.size(problem.batch.ndim + 1);
  problem.weights = matrices<Input>("weights", weights, problem.batch, problem.rows, problem.cols);
  problem.seed = seed_of(seed);
  problem.p = p;
  Tensor out = allocate(shape_with_tail(weights, 0, {}), weights.scalar_type());
  problem.out = matrices<Output>("out", out, problem.batch, problem.rows, problem.cols);
  launch(cpu::kernels().dropout, problem);
  return out;
}

}  // namespace
}  // namespace mha::ops

STABLE_TORCH_LIBRARY_IMPL(mha_ext, CPU, m) { m.impl("dropout", TORCH_BOX(&mha::ops::dropout)); }
