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
struct SoftmaxBackwardRows {
  using Acc = accumulate_t<T>;
  static constexpr int N = kRun<T>;

  const SoftmaxBackward& p;
  const Team team;
  const BatchVisibility visibility;
  const T* const weights;
  const T* const grad_weights;
  const T* const scores;
  const Acc* const sink_weights;
  const Acc* const grad_sink_weights;
  T* const grad_scores;
  T* const grad_logits;
  Acc* const grad_sink_rows;
  const Acc softcap;

  __device__ SoftmaxBackwardRows(const SoftmaxBackward& problem, const Team& row_team, int64_t entry)
      : p(problem),
        team(row_team),
        visibility(p.apply_visibility ? visibility_of(p.visibility, p.batch, entry, p.cols) : all_visible(p.cols)),
        weights(matrix<const T>(p.batch, entry, p.weights)),
        grad_weights(matrix<const T>(p.batch, entry, p.grad_weights)),
        scores(matrix_or_null<T>(p.batch, entry, p.scores)),
        sink_weights(matrix_or_null<Acc>(p.batch, entry, p.sink_weights)),
        grad_sink_weights(matrix_or_null<Acc>(p.batch, entry, p.grad_sink_weights)),
        grad_scores(matrix<T>(p.batch, entry, p.grad_scores)),
        grad_logits(matrix_or_null<T>(p.batch, entry, p.grad_logits)),
        grad_sink_rows(matrix_or_null<Acc>(p.batch, entry, p.grad_sink_rows)),
        softcap(softcap_in<Acc>(p.softcap)) {}

  __device__ __forceinline__ void operator()(int64_t i) const {
    const RowReader<T> w(weights, p.weights, i), g(grad_weights, p.grad_weights, i), s(scores, p.scores, i);
    const RowWriter<T> ds(grad_scores, p.grad_scores, i), dx(grad_logits, p.grad_logits, i);
    const RowVisibility visible(visibility, i);
    const bool as_runs = w.has_runs() && g.has_runs() && ds.has_runs();
    const Acc sink = sink_weights ? sink_weights[i * p.sink_weights.row_stride] : Acc{0};
    const Acc sink_grad = grad_sink_weights ? grad_sink_weights[i * p.grad_sink_weights.row_stride] : Acc{0};

    // Over all keys: with a finite mask_value hidden ones have weight too.
    Acc delta = 0;
    for_keys<T>(team, p.cols, as_runs, [&](const Keys<N>& keys, int64_t) {
      Acc weight[N], grad[N];
      w.read(keys, weight);
      g.read(keys, grad);
#pragma unroll
      for (int k = 0; k < N; ++k)
        if (weight[k] != 0) delta += weight[k] * grad[k];
    });
    delta = team.sum(delta);
    if (sink != 0) delta += sink * sink_grad;

    for_keys<T>(team, p.cols, as_runs, [&](const Keys<N>& keys, int64_t) {
      const uint32_t seen = visible.bits(keys);
      Acc weight[N], d[N];
      w.read(keys, weight);
      g.read(keys, d);
#pragma unroll
      for (int k = 0; k < N; ++k) d[k] = weight[k] != 0 && (seen >> k & 1) ? weight[k] * (d[k] - delta) : Acc{0};
      if (dx) dx.write(keys, d);
      if (s) multiply_by_slope(s, keys, d);
      ds.write(keys, d);
    });
    if (grad_sink_rows && team.rank == 0)
      grad_sink_rows[i * p.grad_sink_rows.row_stride] = sink == 0 ? Acc{0} : sink * (sink_grad - delta);
  }

  // A hidden score may be NaN, so the slope only counts where there is a gradient.
  __device__ __forceinline__ void multiply_by_slope(const RowReader<T>& s, const Keys<N>& keys, Acc (&d)[N]) const {
    Acc score[N];
    s.read(keys, score);
#pragma unroll
    for (int k = 0; k < N; ++k)
      if (d[k] != 0) d[k] *= tanh_slope(score[k] / softcap);
  }
};

template <class T>
__global__ void __launch_bounds__(kRowThreads, 3)
    softmax_backward_kernel(const __grid_constant__ SoftmaxBackward p, const __grid_constant__ RowCut cut) {
  const Team team(cut);
  cut.for_each_row([&](int64_t entry) { return SoftmaxBackwardRows<T>(p, team, entry); });
}

}  // namespace mha::cuda
