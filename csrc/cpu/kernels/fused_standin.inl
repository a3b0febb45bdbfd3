// Stand-in until the fused kernels are there: the plain loops of the tests.
#include "../../../tests/cpp/naive_attention.h"

template <class T>
struct FusedMergeKernel {
  static int64_t tasks(const FusedForward&) { return 0; }
  static void run(const FusedForward&, int64_t, int64_t) {}
};

template <class T>
struct FusedDeltaKernel {
  static int64_t tasks(const FusedBackward& p) { return p.batch.count() * p.queries; }
  static void run(const FusedBackward& p, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) naive::delta_row<T>(p, t / p.queries, t % p.queries);
  }
};

template <class T>
struct FusedBackwardKernel {
  static int64_t tasks(const FusedBackward& p) { return p.batch.count() / p.group; }
  static void run(const FusedBackward& p, int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) naive::backward_group<T>(p, g);
  }
};

template <class T>
struct FusedBiasBackwardKernel {
  static int64_t tasks(const FusedBackward&) { return 1; }
  static void run(const FusedBackward& p, int64_t begin, int64_t end) {
    if (begin == end) return;
    int64_t last = p.queries * p.keys == 0 ? 0 : (p.queries - 1) * p.grad_bias.row_stride + (p.keys - 1) * p.grad_bias.col_stride;
    for (int d = 0; d < p.batch.ndim; ++d) last += (p.batch.size[d] - 1) * p.grad_bias.batch_stride[d];
    naive::bias_backward<T>(p, last + 1);
  }
};
