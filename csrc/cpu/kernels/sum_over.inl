// Sum over broadcast dimensions in a fixed order: the gradient of a bias has the bias's own shape.

template <class T>
struct SumOverKernel {
  using Acc = accumulate_t<T>;

  // One task per element of the output: dimensions in which the output has stride 0 are summed.
  static int64_t tasks(const SumOver& p) {
    int64_t n = 1;
    for (int d = 0; d < p.shape.ndim; ++d)
      if (p.out.batch_stride[d] != 0) n *= p.shape.size[d];
    return n;
  }

  static void run(const SumOver& p, int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      int64_t rest = task, x_offset = 0, out_offset = 0;
      BatchShape summed;
      int64_t summed_stride[kMaxBatchDims];
      for (int d = p.shape.ndim - 1; d >= 0; --d) {
        if (p.out.batch_stride[d] == 0) {
          summed.size[summed.ndim] = p.shape.size[d];
          summed_stride[summed.ndim++] = p.x.batch_stride[d];
          continue;
        }
        const int64_t i = rest % p.shape.size[d];
        rest /= p.shape.size[d];
        x_offset += i * p.x.batch_stride[d];
        out_offset += i * p.out.batch_stride[d];
      }
      Acc sum = 0;
      for (int64_t i = 0, n = summed.count(); i < n; ++i)
        sum += widen(static_cast<const T*>(p.x.data)[x_offset + batch_offset(summed, i, summed_stride)]);
      static_cast<T*>(p.out.data)[out_offset] = narrow<T>(sum);
    }
  }
};
