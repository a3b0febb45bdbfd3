// Dropout.

// The number itself stays where it is: on a GPU, reading it here would wait for everything before it.
const int64_t* seed_of(const Tensor& seed) {
  require_type("seed", seed, ScalarType::Long);
  require(seed.numel() == 1, "seed must hold one number, got shape ", shape_text(seed));
  return static_cast<const int64_t*>(data_of("seed", Input{}, seed));
}

void require_probability(const char* name, double p) {
  require(p >= 0 && p <= 1, name, " must lie in [0, 1], got ", p);
}

Tensor dropout(const Tensor& weights, const Tensor& seed, double p) {
  const Device::Scope scope(weights);
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
  Device::dropout(problem);
  return out;
}
