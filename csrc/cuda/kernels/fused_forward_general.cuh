// Fused forward for float, double and heads that are too large for the tensor cores' tiles: the recurrence of
// fused_forward_tile.cuh with multiplications and additions of one element each. A block of 16 x 16 threads takes some
// queries and some columns of the output. A thread has every 16th query and every 16th key of a tile, so half a warp
// shares a row, and its softmax needs shuffles only.
#pragma once
#include "fused_placement.cuh"

namespace mha::cuda {

constexpr int kSide = 16;  // a block is a square of threads

// kPerThread: queries of a thread, 4, or 1 where there are few. kColumns: of the output, per block.
template <class T_, int kPerThread_, int kColumns_>
struct GeneralShape {
  using T = T_;
  using Acc = accumulate_t<T>;
  static constexpr int kPerThread = kPerThread_, kColumns = kColumns_;
  static constexpr int kThreads = kSide * kSide, kRows = kSide * kPerThread, kKeys = 64;
  static constexpr int kVector = 16 / sizeof(Acc);  // elements that are read from shared memory at once
  static constexpr int kDepth = 32;                 // elements of the head, or keys, that are there at a time
  // Distances of rows: one vector apart from a multiple of all banks, so that 16 lanes, each in a row of its own, meet
  // no bank twice; and half of the banks apart for the two rows of weights that a warp touches.
  static constexpr int kFactorPitch = kDepth + kVector, kWeightPitch = kKeys + 16, kValuePitch = kColumns + kVector;
  static constexpr int kFactors = (kRows + kKeys) * kFactorPitch, kValues = kDepth * kValuePitch;
  static constexpr int kShared = kFactors > kValues ? kFactors : kValues;  // one after the other
  static constexpr int kSharedBytes = (kShared + kRows * kWeightPitch) * static_cast<int>(sizeof(Acc));
};

template <class Shape>
struct GeneralForward {
  using T = typename Shape::T;
  using Acc = typename Shape::Acc;
  static constexpr int kPerThread = Shape::kPerThread, kColumns = Shape::kColumns, kKeys = Shape::kKeys;
  static constexpr int kPerColumn = kKeys / kSide, kOutputs = kColumns / kSide, kVector = Shape::kVector;
  // Then two blocks share a multiprocessor (below), and its registers.
  static constexpr bool kFewQueries = kPerThread == 1;
  using Scores = Acc[kPerThread][kPerColumn];

  const ForwardCall<Acc>& call;
  const FusedForward& p;
  const Placement<T>& place;
  const BatchVisibility& visibility;
  const int64_t first_column;
  const HeadDropout& dropout;
  const int tx = threadIdx.x % kSide, ty = threadIdx.x / kSide;
  Acc *factors, *weights;                                                      // shared
  Acc output[kPerThread][kOutputs], row_max[kPerThread], row_sum[kPerThread];  // the largest number; of the lane's keys

  __device__ __forceinline__ GeneralForward(const ForwardCall<Acc>& c, const Placement<T>& placement, int64_t column,
                                            Acc* shared)
      : call(c),
        p(c.p),
        place(placement),
        visibility(placement.visibility),
        first_column(column),
        dropout(placement.dropout),
        factors(shared),
        weights(shared + Shape::kShared) {
    const Acc sink = place.sink();
    const bool there = sink != Logits<Acc>::kMinusInfinity;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      row_max[i] = there ? sink : Logits<Acc>::kNothingYet;
      row_sum[i] = there && tx == 0 ? 1 : 0;
#pragma unroll
      for (int d = 0; d < kOutputs; ++d) output[i][d] = 0;
    }
  }

  __device__ __forceinline__ int64_t query(int i) const { return place.first_query + ty + kSide * i; }
  __device__ __forceinline__ int64_t key(int64_t first_key, int j) const { return first_key + tx + kSide * j; }
  __device__ __forceinline__ bool scaled() const { return call.logits.scaled; }
  __device__ __forceinline__ RowShift<Acc> shift(int i) const {
    return RowShift<Acc>::of_largest(row_max[i], call.logits.c, scaled());
  }

  // Bit i * kPerColumn + j: query i of the thread sees its key j.
  __device__ __forceinline__ uint32_t seen_keys(int64_t first_key) const {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const KeyRange range = query(i) < p.queries ? visible_keys(visibility, query(i)) : KeyRange{0, 0};
#pragma unroll
      for (int j = 0; j < kPerColumn; ++j) {
        const int64_t k = key(first_key, j);
        bool seen = range.begin <= k && k < range.end;
        if (seen && visibility.mask)
          seen = visibility.mask[query(i) * visibility.mask_row_stride + k * visibility.mask_col_stride] != 0;
        bits |= static_cast<uint32_t>(seen) << (i * kPerColumn + j);
      }
    }
    return bits;
  }

  // kCount rows of a matrix, kDepth columns from `column` on, widened; what is not there counts as zero. Returns
  // whether all that this thread has read is finite.
  template <int kCount, int kWidth, int kPitch>
  static __device__ __forceinline__ bool read(Acc* to, const T* from, int64_t row_stride, int64_t col_stride,
                                              int64_t rows, int64_t cols) {
    Acc probe = 0;
    for (int at = threadIdx.x; at < kCount * kWidth; at += Shape::kThreads) {
      const int row = at / kWidth, col = at % kWidth;
      const Acc x = row < rows && col < cols ? to_accumulate(from[row * row_stride + col * col_stride]) : Acc{0};
      to[row * kPitch + col] = x;
      probe = fused_multiply_add(x, Acc{0}, probe);
    }
    return probe == 0;
  }

  struct alignas(16) Vector {
    Acc x[kVector];
  };
  static __device__ __forceinline__ Vector vector_at(const Acc* p) { return *reinterpret_cast<const Vector*>(p); }

  // S = Q K^T
  __device__ __forceinline__ void score(Scores& s, int64_t first_key) {
    constexpr int kPitch = Shape::kFactorPitch;
    const T* const queries = place.input(Placement<T>::kQuery) + place.first_query * p.query.row_stride;
    const T* const keys = place.input(Placement<T>::kKey) + first_key * p.key.row_stride;
    Acc* const key_rows = factors + Shape::kRows * kPitch;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i)
#pragma unroll
      for (int j = 0; j < kPerColumn; ++j) s[i][j] = 0;
    for (int64_t d = 0; d < p.head_dim; d += Shape::kDepth) {
      __syncthreads();
      read<Shape::kRows, Shape::kDepth, kPitch>(factors, queries + d * p.query.col_stride, p.query.row_stride,
                                                p.query.col_stride, p.queries - place.first_query, p.head_dim - d);
      read<kKeys, Shape::kDepth, kPitch>(key_rows, keys + d * p.key.col_stride, p.key.row_stride, p.key.col_stride,
                                         p.keys - first_key, p.head_dim - d);
      __syncthreads();
#pragma unroll(kFewQueries ? 2 : 4)
      for (int depth = 0; depth < Shape::kDepth; depth += kVector) {
        Vector a[kPerThread], b[kPerColumn];
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) a[i] = vector_at(factors + (ty + kSide * i) * kPitch + depth);
#pragma unroll
        for (int j = 0; j < kPerColumn; ++j) b[j] = vector_at(key_rows + (tx + kSide * j) * kPitch + depth);
#pragma unroll
        for (int i = 0; i < kPerThread; ++i)
#pragma unroll
          for (int j = 0; j < kPerColumn; ++j)
#pragma unroll
            for (int v = 0; v < kVector; ++v) s[i][j] = fused_multiply_add(a[i].x[v], b[j].x[v], s[i][j]);
      }
    }
  }

  __device__ __forceinline__ void to_logits(Scores& s, int64_t first_key, uint32_t seen) const {
    const T* const bias = place.input(Placement<T>::kBias);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i)
#pragma unroll
      for (int j = 0; j < kPerColumn; ++j) {
        const int64_t k = key(first_key, j);
        if (!(seen >> (i * kPerColumn + j) & 1)) {
          s[i][j] = k < p.keys ? call.logits.hidden : Logits<Acc>::kMinusInfinity;
        } else if (scaled()) {
          const Acc added = bias ? to_accumulate(bias[query(i) * p.bias.row_stride + k * p.bias.col_stride]) : Acc{0};
          s[i][j] = call.logits.logit(s[i][j], added);
        }
      }
  }

  // Logits to weights relative to the maximum so far, and the output, if there is one, is rescaled to it; "zero hides":
  // what has no weight any more is gone.
  __device__ __forceinline__ void softmax(Scores& s, bool rescale_output) {
    const Acc c = call.logits.c;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      Acc max = Logits<Acc>::kMinusInfinity;
#pragma unroll
      for (int j = 0; j < kPerColumn; ++j) max = larger(max, s[i][j]);
#pragma unroll
      for (int lanes = 1; lanes < kSide; lanes *= 2) max = larger(max, __shfl_xor_sync(~0u, max, lanes));
      const RowShift<Acc> before = shift(i);
      row_max[i] = larger(row_max[i], max);
      const RowShift<Acc> after = shift(i);
      const Acc factor = before.rescale(after, c);
      row_sum[i] *= factor;
#pragma unroll
      for (int j = 0; j < kPerColumn; ++j) {
        s[i][j] = after.weight(s[i][j], c);
        row_sum[i] += s[i][j];
      }
      if (!rescale_output) continue;
#pragma unroll
      for (int d = 0; d < kOutputs; ++d) output[i][d] = factor == 0 ? Acc{0} : output[i][d] * factor;
    }
  }

  __device__ __forceinline__ void add_up_sums() {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i)
#pragma unroll
      for (int lanes = 1; lanes < kSide; lanes *= 2) row_sum[i] += __shfl_xor_sync(~0u, row_sum[i], lanes);
  }

  // Logits to weights, divided by their sum.
  __device__ __forceinline__ void normalise(Scores& s) const {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const Acc inverse = inverse_sum(row_sum[i], call.keep_scale);
      const RowShift<Acc> shift = this->shift(i);
#pragma unroll
      for (int j = 0; j < kPerColumn; ++j) {
        const Acc e = shift.weight(s[i][j], call.logits.c);
        s[i][j] = e == 0 ? Acc{0} : e * inverse;  // also where the inverse is NaN
      }
    }
  }

  // A row of a tile has eight blocks of Philox, a row of lanes sixteen lanes: each draws one block of two rows.
  __device__ __forceinline__ void drop(Scores& s, int64_t first_key) const {
    const int block = tx % kKeysPerBlock, half = tx / kKeysPerBlock;
#pragma unroll
    for (int i = 0; i < kPerThread; i += 2) {
      const uint32_t mine = dropout.kept(query(i + half), first_key / kKeysPerBlock + block);
#pragma unroll
      for (int of = 0; of < 2; ++of)
#pragma unroll
        for (int j = 0; j < kPerColumn; ++j) {
          const uint32_t kept = __shfl_sync(~0u, mine, of * kKeysPerBlock + 2 * j + half, kSide);
          if (i + of < kPerThread && !(kept >> tx % kKeysPerBlock & 1)) s[i + of < kPerThread ? i + of : i][j] = 0;
        }
    }
  }

  __device__ __forceinline__ void write_weights(const Scores& s, int64_t first_key) const {
    T* const to = place.result(Placement<T>::kWeights);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i)
#pragma unroll
      for (int j = 0; j < kPerColumn; ++j) {
        const int64_t k = key(first_key, j);
        if (query(i) < p.queries && k < p.keys)
          to[query(i) * p.weights.row_stride + k * p.weights.col_stride] = from_accumulate<T>(s[i][j]);
      }
  }

  // O += P V. A weight of 0 contributes nothing, whatever the value; it is looked at only where a value is not finite.
  __device__ __forceinline__ void add_values(const Scores& s, int64_t first_key) {
    const T* const values = place.input(Placement<T>::kValue) + first_column * p.value.col_stride;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPerThread; ++i)
#pragma unroll
      for (int j = 0; j < kPerColumn; ++j) weights[(ty + kSide * i) * Shape::kWeightPitch + tx + kSide * j] = s[i][j];
    for (int k = 0; k < kKeys; k += Shape::kDepth) {
      if (k > 0) __syncthreads();
      const bool finite = read<Shape::kDepth, kColumns, Shape::kValuePitch>(
          factors, values + (first_key + k) * p.value.row_stride, p.value.row_stride, p.value.col_stride,
          p.keys - first_key - k, p.value_dim - first_column);
      if (__syncthreads_or(!finite)) add_keys<true>(k);
      else add_keys<false>(k);
    }
  }

  template <bool kCareful>
  __device__ __forceinline__ void add_keys(int first) {
#pragma unroll(kFewQueries ? 1 : 2)
    for (int k = 0; k < Shape::kDepth; k += kVector) {
      Vector a[kPerThread];
#pragma unroll
      for (int i = 0; i < kPerThread; ++i)
        a[i] = vector_at(weights + (ty + kSide * i) * Shape::kWeightPitch + first + k);
#pragma unroll
      for (int v = 0; v < kVector; ++v)
#pragma unroll
        for (int d = 0; d < kOutputs; d += kVector) {
          const Vector b = vector_at(factors + (k + v) * Shape::kValuePitch + tx * kVector + d * kSide);
#pragma unroll
          for (int i = 0; i < kPerThread; ++i)
#pragma unroll
            for (int u = 0; u < kVector; ++u)
              if (!kCareful || a[i].x[v] != 0)
                output[i][d + u] = fused_multiply_add(a[i].x[v], b.x[u], output[i][d + u]);
        }
    }
  }

  // One pass over tiles of keys: the online softmax, or, once the sums are known, the weights.
  __device__ __forceinline__ void pass(const KeyTiles& tiles, bool all, bool with_values, bool normalised) {
    for (uint32_t tile = tiles.begin; tile < tiles.end; ++tile) {
      const int64_t first_key = int64_t{tile} * kKeys;
      const uint32_t seen = seen_keys(first_key);
      if (!all && visibility.mask && !__syncthreads_or(seen != 0)) continue;
      Scores s;
      score(s, first_key);
      to_logits(s, first_key, seen);
      if (normalised) normalise(s);
      else softmax(s, with_values);
      if (dropout.active() && with_values) drop(s, first_key);
      if (normalised && first_column == 0) write_weights(s, first_key);
      if (with_values) add_values(s, first_key);
    }
    if (!normalised) add_up_sums();
  }

  __device__ __forceinline__ void run() {
    pass(place.tiles, call.logits.hidden_have_weight, !p.weights, false);
    if (p.weights) pass({0, static_cast<uint32_t>(ceil_div(p.keys, kKeys))}, true, true, true);
    finish();
  }

  // One vector of neighbouring columns, at once where it lies so.
  template <class U>
  static __device__ __forceinline__ void write(U* to, int64_t stride, int64_t count, const Acc* x, Acc factor) {
    struct alignas(sizeof(U) * kVector) Out {
      U x[kVector];
    } out;
#pragma unroll
    for (int u = 0; u < kVector; ++u) out.x[u] = from_accumulate<U>(x[u] * factor);
    if (stride == 1 && count >= kVector && reinterpret_cast<uintptr_t>(to) % sizeof(Out) == 0) {
      *reinterpret_cast<Out*>(to) = out;
    } else {
#pragma unroll
      for (int u = 0; u < kVector; ++u)
        if (u < count) to[u * stride] = out.x[u];
    }
  }

  __device__ __forceinline__ void finish() const {
    const Partials<Acc> partials(p, call.parts);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (query(i) >= p.queries) continue;
      const bool statistics = tx == 0 && first_column == 0;
      Acc* const part = call.parts > 1 ? partials.at(place.entry, query(i), place.part) : nullptr;
      const Acc factor = part || p.weights ? Acc{1} : inverse_sum(row_sum[i], call.keep_scale);
#pragma unroll
      for (int d = 0; d < kOutputs; d += kVector) {
        const int64_t column = first_column + tx * kVector + d * kSide, left = p.value_dim - column;
        if (part) {
          write(part + column, 1, left, output[i] + d, factor);
        } else {
          T* const to = place.result(Placement<T>::kOutput) + query(i) * p.output.row_stride;
          write(to + column * p.output.col_stride, p.output.col_stride, left, output[i] + d, factor);
        }
      }
      if (!statistics) continue;
      const auto row = RowStatistics<Acc>::of_largest(row_max[i], row_sum[i], call.logits.c, scaled());
      if (part) {
        part[p.value_dim] = row.max;
        part[p.value_dim + 1] = row.sum;
      } else if (p.row_max) {
        place.write_statistics(p, query(i), row);
      }
    }
  }
};

template <class T, int kPerThread, int kColumns>
__global__ void __launch_bounds__(kSide* kSide, kPerThread == 1 ? 2 : 1)
    fused_forward_general(const __grid_constant__ ForwardCall<accumulate_t<T>> call) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ Placement<T> place;
  using Shape = GeneralShape<T, kPerThread, kColumns>;
  place.fill(call, call.first_block + blockIdx.x, Shape::kRows, Shape::kKeys);
  GeneralForward<Shape> block(call, place, int64_t{blockIdx.y} * kColumns, reinterpret_cast<accumulate_t<T>*>(shared));
  block.run();
}

}  // namespace mha::cuda
