// Masked softmax of one query row:
//   x_j = softcap tanh(scores_j / softcap) + bias_j for visible keys, mask_value for hidden ones
//   P_j = e^(x_j - m) / (sum_k e^(x_k - m) + e^(sink - m)),  m = max(x, sink)
// Three passes of the row's team: max, sum, weights. Between them x, and then e^(x - m), stay in shared memory where a
// row has room there; else each pass computes them anew.
#pragma once
#include "../../core/finite.h"
#include "rows.cuh"

namespace mha::cuda {

template <class T>
struct SoftmaxForwardRows {
  using Acc = accumulate_t<T>;
  static constexpr int N = kRun<T>;

  const SoftmaxForward& p;
  const Team team;
  Acc* const kept;  // room for a row of the team; null: none
  const BatchVisibility visibility;
  const T* const scores;
  const T* const bias;
  T* const weights;
  Acc* const sink_weights;
  const Acc sink, hidden, softcap;

  __device__ SoftmaxForwardRows(const SoftmaxForward& problem, const Team& row_team, Acc* room, int64_t entry)
      : p(problem),
        team(row_team),
        kept(room),
        visibility(visibility_of(p.visibility, p.batch, entry, p.cols)),
        scores(matrix<const T>(p.batch, entry, p.scores)),
        bias(matrix_or_null<T>(p.batch, entry, p.bias)),
        weights(matrix<T>(p.batch, entry, p.weights)),
        sink_weights(matrix_or_null<Acc>(p.batch, entry, p.sink_weights)),
        sink(p.sinks ? to_accumulate(*matrix<const T>(p.batch, entry, p.sinks)) : to_finite<Acc>(-__builtin_inf())),
        hidden(to_finite<Acc>(p.mask_value)),
        softcap(softcap_in<Acc>(p.softcap)) {}

  struct Row {
    RowReader<T> scores, bias;
    RowWriter<T> weights;
    RowVisibility visibility;
  };

  __device__ __forceinline__ void operator()(int64_t i) const {
    const Row row{{scores, p.scores, i}, {bias, p.bias, i}, {weights, p.weights, i}, {visibility, i}};
    const bool as_runs = row.scores.has_runs() && row.weights.has_runs();
    const Acc minus_infinity = to_finite<Acc>(-__builtin_inf());

    Acc max = larger(sink, minus_infinity);  // a sink may be NaN
    for_keys<T>(team, p.cols, as_runs, [&](const Keys<N>& keys, int64_t slot) {
      Acc x[N];
      logits(row, keys, x);
      keep(slot, x);
#pragma unroll
      for (int k = 0; k < N; ++k) max = larger(max, x[k]);  // NaNs left aside: they show in the sum
    });
    max = team.max(max);
    // With nothing but -inf in the row any finite value does: every term becomes 0, and so does the row.
    if (max == minus_infinity) max = 0;

    Acc sum = 0;
    for_keys<T>(team, p.cols, as_runs, [&](const Keys<N>& keys, int64_t slot) {
      Acc e[N];
      if (kept) recall(slot, e);
      else logits(row, keys, e);
#pragma unroll
      for (int k = 0; k < N; ++k) sum += e[k] = exp_nonpositive(e[k] - max);
      keep(slot, e);
    });
    const Acc sink_term = exp_nonpositive(sink - max);
    sum = team.sum(sum) + sink_term;
    const Acc factor = sum == 0 ? Acc{0} : 1 / sum;

    for_keys<T>(team, p.cols, as_runs, [&](const Keys<N>& keys, int64_t slot) {
      Acc e[N];
      if (kept) recall(slot, e);
      else exponentials(row, keys, max, e);
#pragma unroll
      for (int k = 0; k < N; ++k) e[k] = weight(e[k], factor);
      row.weights.write(keys, e);
    });
    if (sink_weights && team.rank == 0) sink_weights[i * p.sink_weights.row_stride] = weight(sink_term, factor);
  }

  // Where the row has seen NaN, the factor is NaN, but keys without weight, hidden ones among them, still have none.
  __device__ static __forceinline__ Acc weight(Acc e, Acc factor) { return e == 0 ? Acc{0} : e * factor; }

  // x of some keys; -inf for those past the row's end.
  __device__ __forceinline__ void logits(const Row& row, const Keys<N>& keys, Acc (&x)[N]) const {
    const uint32_t visible = row.visibility.bits(keys);
    Acc b[N] = {};
    if (visible) {
      row.scores.read(keys, x);
      if (row.bias) row.bias.read(keys, b);
    }
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (!(visible >> k & 1)) {
        x[k] = keys.has(k) ? hidden : to_finite<Acc>(-__builtin_inf());
      } else {
        if (softcap != 0) x[k] = softcap * tanh_of(x[k] / softcap);
        x[k] += b[k];
      }
    }
  }

  __device__ __forceinline__ void exponentials(const Row& row, const Keys<N>& keys, Acc max, Acc (&e)[N]) const {
    logits(row, keys, e);
#pragma unroll
    for (int k = 0; k < N; ++k) e[k] = exp_nonpositive(e[k] - max);
  }

  __device__ __forceinline__ void keep(int64_t slot, const Acc (&x)[N]) const {
    if (!kept) return;
#pragma unroll
    for (int k = 0; k < N; ++k) kept[slot + k * team.size] = x[k];
  }
  __device__ __forceinline__ void recall(int64_t slot, Acc (&x)[N]) const {
#pragma unroll
    for (int k = 0; k < N; ++k) x[k] = kept[slot + k * team.size];
  }
};

// `kept`: elements of shared memory for each row at hand; 0: none.
template <class T>
__global__ void __launch_bounds__(kRowThreads, 3)
    softmax_forward_kernel(const __grid_constant__ SoftmaxForward p, const __grid_constant__ RowCut cut, int kept) {
  using Acc = accumulate_t<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  Acc* const room = kept ? reinterpret_cast<Acc*>(shared) + threadIdx.x / cut.team * kept : nullptr;
  const Team team(cut);
  cut.for_each_row([&](int64_t entry) { return SoftmaxForwardRows<T>(p, team, room, entry); });
}

}  // namespace mha::cuda
