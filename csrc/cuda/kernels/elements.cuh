// Elements of the four dtypes on the device: how they are converted, how neighbours move together, and the functions
// of them that the steps need.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../../core/half.h"
#include "../../core/problem.h"
#include "../primitives.cuh"

namespace mha::cuda {

// widen() and narrow() of core/half.h by the hardware's instructions.
template <class T>
__device__ __forceinline__ accumulate_t<T> to_accumulate(T x) {
  if constexpr (std::is_same_v<T, float16>) return __half2float(__ushort_as_half(x.bits));
  else return widen(x);
}

template <class T>
__device__ __forceinline__ T from_accumulate(accumulate_t<T> x) {
  if constexpr (std::is_same_v<T, bfloat16>) return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
  else if constexpr (std::is_same_v<T, float16>) return {__half_as_ushort(__float2half_rn(x))};
  else return x;
}

// A run: N neighbours, 8 or 16 bytes, that one memory instruction moves where their address is a multiple of that.
template <class T, int N>
struct RunWord {
  static constexpr int kBytes = N * static_cast<int>(sizeof(T));
  static_assert(kBytes == 8 || kBytes == 16);
  using type = std::conditional_t<kBytes == 8, uint2, uint4>;
};

template <int N, class T>
__device__ __forceinline__ bool starts_run(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % RunWord<T, N>::kBytes == 0;
}

template <class T, int N>
__device__ __forceinline__ void load_run(const T* p, T (&x)[N]) {
  using Word = typename RunWord<T, N>::type;
  const Word word = *reinterpret_cast<const Word*>(p);
  memcpy(x, &word, sizeof word);
}

// To shared memory.
template <class T, int N>
__device__ __forceinline__ void store_run_shared(T* p, const T (&x)[N]) {
  using Word = typename RunWord<T, N>::type;
  Word word;
  memcpy(&word, x, sizeof word);
  *reinterpret_cast<Word*>(p) = word;
}

// To global memory. By an intrinsic: of a plain assignment nvcc made as many instructions as there are elements.
template <class T, int N>
__device__ __forceinline__ void store_run(T* p, const T (&x)[N]) {
  using Word = typename RunWord<T, N>::type;
  Word word;
  memcpy(&word, x, sizeof word);
  __stwb(reinterpret_cast<Word*>(p), word);
}

// x, but the compiler no longer knows where it came from: it keeps x in a register, where it would calculate it anew in
// every turn of a loop.
__device__ __forceinline__ int calculated_once(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Offset of element `flat` of a shape, in the order of that shape. As batch_offset of core/strides.h, but without the
// division that the outermost dimension does not need: a shape of one dimension costs none.
__device__ __forceinline__ int64_t element_offset(const BatchShape& shape, int64_t flat, const int64_t* strides) {
  int64_t offset = 0;
  for (int d = shape.ndim - 1; d > 0; --d) {
    const int64_t rest = flat / shape.size[d];
    offset += (flat - rest * shape.size[d]) * strides[d];
    flat = rest;
  }
  return shape.ndim ? offset + flat * strides[0] : 0;
}

// The matrix of one batch entry: matrix() of core/strides.h by the above.
template <class T, class Pointer>
__device__ __forceinline__ T* matrix_of(const BatchShape& batch, int64_t entry, const Strided<Pointer>& stack) {
  return static_cast<T*>(stack.data) + element_offset(batch, entry, stack.batch_stride);
}

__device__ __forceinline__ bool is_finite(float x) { return x - x == 0; }
__device__ __forceinline__ bool is_finite(double x) { return x - x == 0; }

// e^x for x <= 0 or NaN. What would be subnormal is 0, as on the CPU: a weight that is 0 hides its value.
// In float as 2^t (1 + r ln 2), where t + r is x log2(e) in twice the precision: fewer instructions than expf, and the
// same error of some 2 units in the last place.
__device__ __forceinline__ float exp_nonpositive(float x) {
  constexpr float kLog2e = 0x1.715476p+0f, kLog2eRest = 0x1.4ae0cp-26f, kLn2 = 0x1.62e43p-1f;
  const float t = x * kLog2e;
  const float r = fmaf(x, kLog2eRest, fmaf(x, kLog2e, -t));
  const float power = exp2_approximate(t);
  return x < -87.0f ? 0.0f : fmaf(power, r * kLn2, power);
}
__device__ __forceinline__ double exp_nonpositive(double x) { return x < -708.0 ? 0.0 : exp(x); }

__device__ __forceinline__ float tanh_of(float y) { return tanhf(y); }
__device__ __forceinline__ double tanh_of(double y) { return tanh(y); }

// 1 - tanh(y)^2 = 4 e / (1 + e)^2 with e = e^(-2|y|): right where 1 - tanh^2 would cancel.
template <class Acc>
__device__ __forceinline__ Acc tanh_slope(Acc y) {
  const Acc e = exp_nonpositive(y < 0 ? 2 * y : -2 * y);
  return 4 * e / ((1 + e) * (1 + e));
}

__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }  // the other one where one is NaN
__device__ __forceinline__ double larger(double a, double b) { return fmax(a, b); }

}  // namespace mha::cuda
