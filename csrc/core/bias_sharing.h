// Which entries share a matrix of the bias: the gradient of its elements is a sum over them.
#pragma once
#include "attention.h"
#include "strides.h"

namespace mha {

// Batch entries as (matrix of the bias, entry that shares it); an entry's number is the sum of two offsets. Only the
// first `dims` dimensions count, the others stay at 0.
struct BiasSharing {
  BatchShape matrices, sharing;
  int64_t numbers[kMaxBatchDims];

  MHA_INLINE_MEMBER static BiasSharing of(const FusedBackward& p, int dims) {
    BiasSharing split;
    split.matrices.ndim = split.sharing.ndim = p.batch.ndim;
    int64_t number = 1;
    for (int d = p.batch.ndim - 1; d >= 0; --d) {
      const int64_t size = d < dims ? p.batch.size[d] : 1;
      const bool shared = p.grad_bias.batch_stride[d] == 0 && size != 1;
      split.matrices.size[d] = shared ? 1 : size;
      split.sharing.size[d] = shared ? size : 1;
      split.numbers[d] = number;
      number *= p.batch.size[d];
    }
    return split;
  }

  MHA_INLINE_MEMBER int64_t entry(int64_t matrix, int64_t shared) const {
    return batch_offset(matrices, matrix, numbers) + batch_offset(sharing, shared, numbers);
  }
};

// The bias has one row for all queries, one column for all keys.
MHA_INLINE bool bias_has_one_row(const FusedBackward& p) { return p.grad_bias.row_stride == 0 && p.queries != 1; }
MHA_INLINE bool bias_has_one_column(const FusedBackward& p) { return p.grad_bias.col_stride == 0 && p.keys != 1; }

}  // namespace mha
