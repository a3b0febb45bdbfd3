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
  const auto part = [&](int64_t n) {
    const Acc* const statistics = first + n * stride + p.value_dim;
    return RowStatistics<Acc>{statistics[0], statistics[1]};
  };
  RowStatistics<Acc> largest{Logits<Acc>::kNothingYet, 0};
  for (int64_t n = 0; n < call.parts; ++n)
    if (part(n).sum != 0 && (largest.sum == 0 || part(n).exceeds(largest))) largest = part(n);
  const RowShift<Acc> shift = largest.shift(call.logits.scaled);
  // 0 for a part without weight.
  const auto factor = [&](const RowStatistics<Acc>& part) {
    return part.sum == 0 ? Acc{0} : part.shift(call.logits.scaled).rescale(shift, call.logits.c);
  };
  Acc sum = 0;
  for (int64_t n = 0; n < call.parts; ++n) sum += factor(part(n)) * abs(part(n).sum);
  const Acc inverse = inverse_sum(sum, call.keep_scale);
  T* const output = matrix<T>(p.batch, entry, p.output) + query * p.output.row_stride;
  for (int64_t d = threadIdx.x; d < p.value_dim; d += kMergeThreads) {
    Acc total = 0;
    for (int64_t n = 0; n < call.parts; ++n) {
      const Acc times = factor(part(n));
      if (times != 0) total = fused_multiply_add(times, first[n * stride + d], total);  // else it may have met NaN
    }
    output[d * p.output.col_stride] = from_accumulate<T>(total * inverse);
  }
  if (p.row_max && threadIdx.x == 0) {
    const auto all = RowStatistics<Acc>::of(largest.max, sum, largest.is_far());
    matrix<Acc>(p.batch, entry, p.row_max)[query * p.row_max.row_stride] = all.max;
    matrix<Acc>(p.batch, entry, p.row_sum)[query * p.row_sum.row_stride] = all.sum;
  }
}

}  // namespace mha::cuda
