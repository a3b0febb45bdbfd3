// The plain structs that describe one kernel call. No torch, no ownership: pointers, sizes and strides only.
// Nothing in them belongs to one device.
//
// work() is a number of scalar operations, from which launch decides whether threads pay. Exact for Product; elsewhere
// the factor per element is an estimate.
#pragma once
#include <cstdint>

#include "inline.h"

namespace mha {

enum class DType : int { f64 = 0, f32 = 1, bf16 = 2, f16 = 3 };
constexpr int kDTypes = 4;

// Leading dimensions (batch dimensions and heads) that one call may have. Python users stay far below; every level of
// vmap adds one, and grouped-query attention splits the head dimension in two.
constexpr int kMaxBatchDims = 16;

struct BatchShape {
  int ndim = 0;
  int64_t size[kMaxBatchDims] = {};

  MHA_INLINE_MEMBER int64_t count() const {
    int64_t n = 1;
    for (int d = 0; d < ndim; ++d) n *= size[d];
    return n;
  }
};

// A stack of matrices seen through strides, all counted in elements. Stride 0 is how broadcasting is spelled: nothing
// that is broadcast is ever copied to its full size.
template <class Pointer>
struct Strided {
  Pointer data = nullptr;
  int64_t batch_stride[kMaxBatchDims] = {};
  int64_t row_stride = 0;
  int64_t col_stride = 0;

  MHA_INLINE_MEMBER explicit operator bool() const { return data != nullptr; }
};
using Input = Strided<const void*>;
using Output = Strided<void*>;

// C[m][n] = alpha * sum over groups g and depth k of A[g][m][k] * B[g][k][n], for every entry of `batch`.
// Scores, weighted sums and all their derivatives are this one product with other strides (csrc/README.md).
struct Product {
  DType dtype = DType::f32;
  BatchShape batch;
  int64_t m = 0, n = 0, k = 0, groups = 1;
  Input a;   // row = m, col = k
  Input b;   // row = k, col = n
  Output c;  // row = m, col = n
  int64_t a_group_stride = 0, b_group_stride = 0;
  double alpha = 1.0;
  // A factor of A that is exactly zero contributes nothing, whatever B holds: a hidden key has weight zero and may
  // hold NaN.
  bool zero_hides = false;

  double work() const { return 2.0 * batch.count() * m * n * k * groups; }  // a multiplication and an addition each
};

// Which keys a query may see; see masking.h for the rule.
struct Visibility {
  int64_t window_left = INT64_MAX, window_right = INT64_MAX;  // INT64_MAX: unbounded on that side
  int64_t causal_offset = 0;
  Input causal_offsets;  // int64, one per batch entry, added to causal_offset
  Input key_lengths;     // int64, one per batch entry
  Input mask;            // bool, true = may attend
};

// P = softmax over the keys of x, where x = softcap * tanh(scores / softcap) + bias and hidden keys get mask_value.
struct SoftmaxForward {
  DType dtype = DType::f32;
  BatchShape batch;
  int64_t rows = 0, cols = 0;  // queries, keys
  Input scores, bias;
  Input sinks;  // one per batch entry: a logit that enters the denominator only
  Visibility visibility;
  double softcap = 0.0;  // 0: none
  double mask_value = 0.0;
  Output weights;
  Output sink_weights;  // one per row, accumulation type: the probability that went to the sink

  double work() const { return 16.0 * batch.count() * rows * cols; }  // mostly the exponential
};

// dx = P * (dP - sum P dP), the softmax Jacobian (symmetric, so forward mode uses it as well).
struct SoftmaxBackward {
  DType dtype = DType::f32;
  BatchShape batch;
  int64_t rows = 0, cols = 0;
  Input weights, grad_weights;
  Input sink_weights, grad_sink_weights;  // one per row, accumulation type; grad may be absent (zero)
  Input scores;                           // only with softcap
  // With mask_value = -inf a hidden weight is zero, which says all; with a finite one hidden keys have weight but
  // their logit is a constant, so the mask is needed again.
  bool apply_visibility = false;
  Visibility visibility;
  double softcap = 0.0;
  Output grad_scores;
  Output grad_logits;     // optional: dx itself, before softcap's derivative
  Output grad_sink_rows;  // one per row, accumulation type

  double work() const { return 12.0 * batch.count() * rows * cols; }  // two passes over the row
};

// out = weights * keep / (1 - p), keep from the counter-based generator of philox.h.
struct Dropout {
  DType dtype = DType::f32;
  BatchShape batch;  // the last entry is the head dimension
  int64_t rows = 0, cols = 0;
  Input weights;
  Output out;
  const int64_t* seed = nullptr;  // 64 random bits, where the tensors are
  double p = 0.0;

  double work() const { return 10.0 * batch.count() * rows * cols; }  // mostly Philox, an eighth of a block each
};

// What an element of a mask is, as far as "not zero" is concerned: -0.0 is zero.
enum class MaskKind : int { bits8, bits16, bits32, bits64, float16, float32, float64 };

// keep = mask != 0, element by element in the order of `shape`. bfloat16 and float16 alike but for the sign bit.
struct KeepMask {
  MaskKind kind = MaskKind::bits8;
  BatchShape shape;
  Input mask;            // batch_stride holds the strides of all dimensions
  bool* keep = nullptr;  // without gaps
};

// out = sum of x over every dimension in which out's stride is 0. `shape` holds all dimensions, matrices included.
struct SumOver {
  DType dtype = DType::f32;
  BatchShape shape;
  Input x;
  Output out;
  // Room for the sums of parts, accumulation type: with it the terms of few results are shared out over many tasks
  // (CPU: sum_plan.h says how much, and the kernel sum_partials must follow, too little work for threads) or blocks
  // (cuda/launch.h). Null: one task or block per block of results.
  void* partials = nullptr;

  double work() const { return 2.0 * shape.count(); }  // an element is read and added
};

}  // namespace mha
