// Backward of the masked softmax for one query row:
//   delta = sum_j P_j dP_j + p_s dp_s         (s: the sink; terms whose weight is 0 are skipped)
//   dx_j  = P_j (dP_j - delta), 0 for hidden keys
//   dscores_j = dx_j (1 - tanh(scores_j / softcap)^2)
// Two passes of the row's team; the second finds the row in a cache.
#pragma once
#include "../../core/finite.h"
#include "rows.cuh"

namespace mha::cuda {

template <class T>
__device__ __forceinline__ void softmax_backward_row(const SoftmaxBackward& p, const Team& team, int64_t entry,
                                                     int64_t i) {
  using Acc = accumulate_t<T>;
  constexpr int N = kRowRun<T>;
  const RowReader<T> weights(p.batch, entry, p.weights, i), grad_weights(p.batch, entry, p.grad_weights, i);
  const RowReader<T> scores(p.batch, entry, p.scores, i);
  const RowWriter<T> grad_scores(p.batch, entry, p.grad_scores, i), grad_logits(p.batch, entry, p.grad_logits, i);
  const RowVisibility visibility = p.apply_visibility
                                       ? RowVisibility(visibility_of(p.visibility, p.batch, entry, p.cols), i)
                                       : RowVisibility(p.cols);
  const bool as_runs = weights.has_runs() && grad_weights.has_runs() && grad_scores.has_runs();

  // Over all keys: with a finite mask_value hidden ones have weight too.
  Acc delta = 0;
  for_keys<T>(team, p.cols, as_runs, [&](const Keys<N>& keys, int) {
    Acc w[N], g[N];
    weights.read(keys, w);
    grad_weights.read(keys, g);
#pragma unroll
    for (int k = 0; k < N; ++k)
      if (w[k] != 0) delta += w[k] * g[k];
  });
  delta = team.sum(delta);
  const auto of_row = [&](const Input& stack) { return stack ? *row_of<const Acc>(p.batch, entry, stack, i) : Acc{0}; };
  const Acc sink = of_row(p.sink_weights), grad_sink = of_row(p.grad_sink_weights);
  if (sink != 0) delta += sink * grad_sink;

  const Acc over_softcap = 1 / softcap_in<Acc>(p.softcap);
  for_keys<T>(team, p.cols, as_runs, [&](const Keys<N>& keys, int) {
    const uint32_t visible = visibility.bits(keys);
    Acc w[N], d[N];
    weights.read(keys, w);
    grad_weights.read(keys, d);
#pragma unroll
    for (int k = 0; k < N; ++k) d[k] = w[k] != 0 && (visible >> k & 1) ? w[k] * (d[k] - delta) : Acc{0};
    if (grad_logits) grad_logits.write(keys, d);
    if (scores) {
      Acc s[N];
      scores.read(keys, s);
      // A hidden score may be NaN, so the slope only counts where there is a gradient.
#pragma unroll
      for (int k = 0; k < N; ++k)
        if (d[k] != 0) d[k] *= tanh_slope(s[k] * over_softcap);
    }
    grad_scores.write(keys, d);
  });
  if (p.grad_sink_rows && team.rank == 0)
    *row_of<Acc>(p.batch, entry, p.grad_sink_rows, i) = sink == 0 ? Acc{0} : sink * (grad_sink - delta);
}

template <class T>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks)
    softmax_backward_kernel(const __grid_constant__ SoftmaxBackward p, const __grid_constant__ RowCut cut) {
  const Team team(cut);
  cut.for_each_row([&](int64_t entry, int64_t i) { softmax_backward_row<T>(p, team, entry, i); });
}

}  // namespace mha::cuda
