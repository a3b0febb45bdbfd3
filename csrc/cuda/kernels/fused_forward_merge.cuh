// Keys cut into parts: each part n of a row has left its statistic m_n, its sum l_n and its output O_n, not yet divided
// by the sum. Together
//   m = max m_n,   l = sum_n e^(m_n - m) l_n,   O = sum_n e^(m_n - m) O_n / l,
// added up in the order of the parts.
#pragma once
#include "fused_forward_call.cuh"

namespace mha::cuda {

constexpr int kMergeThreads = 128;

// A block takes a row.
template <class T>
__global__ void __launch_bounds__(kMergeThreads)
    fused_forward_merge(const __grid_constant__ ForwardCall<accumulate_t<T>> call) {
  using Acc = accumulate_t<T>;
  const FusedForward& p = call.p;
  const Partials<Acc> partials(p, call.parts);
  const int64_t row = call.first_block + blockIdx.x, entry = row / p.queries, query = row % p.queries;
  const Acc* const first = partials.at(entry, query, 0);
  const int64_t stride = p.value_dim + 2;
  Acc max = Logits<Acc>::kNothingYet, sum = 0;
  for (int64_t n = 0; n < call.parts; ++n) max = larger(max, first[n * stride + p.value_dim]);
  for (int64_t n = 0; n < call.parts; ++n) {
    const Acc* const statistics = first + n * stride + p.value_dim;
    const Acc factor = Logits<Acc>::rescale(statistics[0], max, call.logits.c, call.logits.scaled);
    sum += factor * statistics[1];
  }
  const Acc inverse = inverse_sum(sum, call.keep_scale);
  T* const output = matrix<T>(p.batch, entry, p.output) + query * p.output.row_stride;
  for (int64_t d = threadIdx.x; d < p.value_dim; d += kMergeThreads) {
    Acc total = 0;
    for (int64_t n = 0; n < call.parts; ++n) {
      const Acc* const part = first + n * stride;
      const Acc factor = Logits<Acc>::rescale(part[p.value_dim], max, call.logits.c, call.logits.scaled);
      if (factor != 0) total = fused_multiply_add(factor, part[d], total);  // a part without weight may have met NaN
    }
    output[d * p.output.col_stride] = from_accumulate<T>(total * inverse);
  }
  if (p.row_max && threadIdx.x == 0) {
    // A row without weight is told by its sum.
    matrix<Acc>(p.batch, entry, p.row_max)[query * p.row_max.row_stride] = sum == 0 ? Logits<Acc>::kMinusInfinity : max;
    matrix<Acc>(p.batch, entry, p.row_sum)[query * p.row_sum.row_stride] = sum;
  }
}

}  // namespace mha::cuda
