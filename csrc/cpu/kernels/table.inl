// One row of the kernel table, from the kernels as compiled for this level.

template <template <class> class K, class Problem, class T>
constexpr Kernel<Problem> kernel() {
  return {&K<T>::tasks, &K<T>::run};
}

// Four element types, in the order of DType.
#define MHA_ALL_DTYPES(K, Problem)                                                            \
  {kernel<K, Problem, double>(), kernel<K, Problem, float>(), kernel<K, Problem, bfloat16>(), \
   kernel<K, Problem, float16>()}

constexpr KernelTable make_table(const char* isa) {
  return {isa,
          MHA_ALL_DTYPES(ProductKernel, Product),
          MHA_ALL_DTYPES(SoftmaxForwardKernel, SoftmaxForward),
          MHA_ALL_DTYPES(SoftmaxBackwardKernel, SoftmaxBackward),
          MHA_ALL_DTYPES(DropoutKernel, Dropout),
          MHA_ALL_DTYPES(SumOverKernel, SumOver),
          MHA_ALL_DTYPES(SumPartialsKernel, SumOver),
          MHA_ALL_DTYPES(FusedForwardKernel, FusedForward),
          MHA_ALL_DTYPES(FusedMergeKernel, FusedForward),
          MHA_ALL_DTYPES(FusedDeltaKernel, FusedBackward),
          MHA_ALL_DTYPES(FusedBackwardKernel, FusedBackward),
          MHA_ALL_DTYPES(FusedBiasBackwardKernel, FusedBackward)};
}

#undef MHA_ALL_DTYPES
