// Masked softmax of one query row:
//   x_j = softcap tanh(scores_j / softcap) + bias_j for visible keys, mask_value for hidden ones
//   P_j = e^(x_j - m) / (sum_k e^(x_k - m) + e^(sink - m)),  m = max(x, sink)
// Three passes of the row's team: max, sum, weights. Between them x, and then e^(x - m), stay in shared memory where a
// row has room there; else each pass computes them anew.
#pragma once
#include "../../core/finite.h"
#include "rows.cuh"

namespace mha::cuda {

// What would be the logit of a key that is not there.
template <class Acc>
__device__ __forceinline__ Acc minus_infinity() {
  return to_finite<Acc>(-__builtin_inf());
}

// The logits of a row.
template <class T>
struct RowLogits {
  using Acc = accumulate_t<T>;
  static constexpr int N = kRowRun<T>;
  RowReader<T> scores, bias;
  RowVisibility visibility;
  Acc softcap, over_softcap, hidden;  // over_softcap: multiplications take less than divisions

  __device__ __forceinline__ RowLogits(const SoftmaxForward& p, int64_t entry, int64_t i)
      : scores(p.batch, entry, p.scores, i),
        bias(p.batch, entry, p.bias, i),
        visibility(visibility_of(p.visibility, p.batch, entry, p.cols), i),
        softcap(softcap_in<Acc>(p.softcap)),
        over_softcap(1 / softcap),
        hidden(to_finite<Acc>(p.mask_value)) {}

  // x of some keys; -inf for those past the row's end.
  __device__ __forceinline__ void read(const Keys<N>& keys, Acc (&x)[N]) const {
    const uint32_t visible = visibility.bits(keys);
    if (visible) {
      scores.read(keys, x);
      if (softcap != 0) {
#pragma unroll
        for (int k = 0; k < N; ++k) x[k] = softcap * tanh_of(x[k] * over_softcap);
      }
      if (bias) {
        Acc b[N];
        bias.read(keys, b);
#pragma unroll
        for (int k = 0; k < N; ++k) x[k] += b[k];
      }
    }
    if (visible == Keys<N>::kAll) return;
#pragma unroll
    for (int k = 0; k < N; ++k)
      if (!(visible >> k & 1)) x[k] = keys.present >> k & 1 ? hidden : minus_infinity<Acc>();
  }
};

// Room for one number for each key of a row, in shared memory; null: none. 16 bytes for each thread in turn.
template <class Acc, int N>
struct RowRoom {
  static constexpr int kWord = 16 / sizeof(Acc);
  Acc* p;
  const Team& team;

  __device__ __forceinline__ explicit operator bool() const { return p != nullptr; }
  __device__ __forceinline__ Acc* at(int begin) const { return p + begin + team.rank * kWord; }

  __device__ __forceinline__ void write(int begin, const Acc (&x)[N]) const {
    Acc* to = at(begin);
#pragma unroll
    for (int k = 0; k < N; k += kWord, to += team.size * kWord) {
      Acc word[kWord];
#pragma unroll
      for (int i = 0; i < kWord; ++i) word[i] = x[k + i];
      store_run_shared(to, word);
    }
  }
  __device__ __forceinline__ void read(int begin, Acc (&x)[N]) const {
    const Acc* from = at(begin);
#pragma unroll
    for (int k = 0; k < N; k += kWord, from += team.size * kWord) {
      Acc word[kWord];
      load_run(from, word);
#pragma unroll
      for (int i = 0; i < kWord; ++i) x[k + i] = word[i];
    }
  }
};

// Where the row has seen NaN, the factor is NaN, but keys without weight, hidden ones among them, still have none.
template <class Acc>
__device__ __forceinline__ Acc weight_of(Acc e, Acc factor) {
  return e == 0 ? Acc{0} : e * factor;
}

template <class T>
__device__ __forceinline__ void softmax_row(const SoftmaxForward& p, const Team& team,
                                            const RowRoom<accumulate_t<T>, kRowRun<T>>& room, int64_t entry,
                                            int64_t i) {
  using Acc = accumulate_t<T>;
  constexpr int N = kRowRun<T>;
  const RowLogits<T> logits(p, entry, i);
  const RowWriter<T> weights(p.batch, entry, p.weights, i);
  const bool as_runs = logits.scores.has_runs() && weights.has_runs();

  Acc max = minus_infinity<Acc>();  // NaN is left aside, here and below: it shows in the sum
  for_keys<T>(team, p.cols, as_runs, [&](const Keys<N>& keys, int begin) {
    Acc x[N];
    logits.read(keys, x);
    if (room) room.write(begin, x);
#pragma unroll
    for (int k = 0; k < N; ++k) max = larger(max, x[k]);
  });
  const Acc sink = p.sinks ? to_accumulate(*row_of<const T>(p.batch, entry, p.sinks, 0)) : minus_infinity<Acc>();
  max = larger(team.max(max), sink);
  // With nothing but -inf in the row any finite value does: every term becomes 0, and so does the row.
  if (max == minus_infinity<Acc>()) max = 0;

  const auto exponentials = [&](const Keys<N>& keys, int begin, Acc(&e)[N]) {
    if (room) room.read(begin, e);
    else logits.read(keys, e);
#pragma unroll
    for (int k = 0; k < N; ++k) e[k] = exp_nonpositive(e[k] - max);
  };
  Acc sum = 0;
  for_keys<T>(team, p.cols, as_runs, [&](const Keys<N>& keys, int begin) {
    Acc e[N];
    exponentials(keys, begin, e);
    if (room) room.write(begin, e);
#pragma unroll
    for (int k = 0; k < N; ++k) sum += e[k];
  });
  const Acc sink_term = exp_nonpositive(sink - max);
  sum = team.sum(sum) + sink_term;
  const Acc factor = sum == 0 ? Acc{0} : 1 / sum;

  for_keys<T>(team, p.cols, as_runs, [&](const Keys<N>& keys, int begin) {
    Acc e[N];
    if (room) room.read(begin, e);
    else exponentials(keys, begin, e);
#pragma unroll
    for (int k = 0; k < N; ++k) e[k] = weight_of(e[k], factor);
    weights.write(keys, e);
  });
  if (p.sink_weights && team.rank == 0) *row_of<Acc>(p.batch, entry, p.sink_weights, i) = weight_of(sink_term, factor);
}

// 96 registers are not enough everywhere.
constexpr int kSoftmaxBlocks = kRowBlocks - 1;

// `slots`: elements of shared memory for each row at hand; 0: none.
template <class T>
__global__ void __launch_bounds__(kRowThreads, kSoftmaxBlocks)
    softmax_forward_kernel(const __grid_constant__ SoftmaxForward p, const __grid_constant__ RowCut cut, int slots) {
  using Acc = accumulate_t<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  const Team team(cut);
  Acc* const memory = slots ? reinterpret_cast<Acc*>(shared) + threadIdx.x / cut.team * slots : nullptr;
  const RowRoom<Acc, kRowRun<T>> room{memory, team};
  cut.for_each_row([&](int64_t entry, int64_t i) { softmax_row<T>(p, team, room, entry, i); });
}

}  // namespace mha::cuda
