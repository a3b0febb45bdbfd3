// What a level exports: its kernels for one element type.

template <class T>
constexpr TypeKernels kernels_for() {
  return {{&ProductKernel<T>::tasks, &ProductKernel<T>::run},
          {&SoftmaxForwardKernel<T>::tasks, &SoftmaxForwardKernel<T>::run},
          {&SoftmaxBackwardKernel<T>::tasks, &SoftmaxBackwardKernel<T>::run},
          {&DropoutKernel<T>::tasks, &DropoutKernel<T>::run},
          {&SumOverKernel<T>::tasks, &SumOverKernel<T>::run},
          {&SumPartialsKernel<T>::tasks, &SumPartialsKernel<T>::run},
          {&FusedForwardKernel<T>::tasks, &FusedForwardKernel<T>::run},
          {&FusedMergeKernel<T>::tasks, &FusedMergeKernel<T>::run},
          {&FusedDeltaKernel<T>::tasks, &FusedDeltaKernel<T>::run},
          {&TileDeltaKernel<T>::tasks, &TileDeltaKernel<T>::run},
          {&FusedBackwardKernel<T>::tasks, &FusedBackwardKernel<T>::run},
          {&FusedBiasBackwardKernel<T>::tasks, &FusedBiasBackwardKernel<T>::run}};
}
