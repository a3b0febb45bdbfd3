// A tile of 64 queries and 64 keys by multiply-adds, for every type, any head size and any strides: its scores and dP,
// worked out by a block of 16 x 16 threads with 4 x 4 elements each.
#pragma once
#include "fused_backward_rules.cuh"

namespace mha::cuda {

// Rows of a matrix, as far as there are any; the others count as 0.
template <class T>
struct TileRows {
  const T* data;
  int64_t row_stride, col_stride, rows, cols;

  template <class Pointer>
  static __device__ TileRows of(const BatchShape& batch, int64_t entry, const Strided<Pointer>& stack, int64_t first,
                                int64_t rows, int64_t cols) {
    return {matrix<const T>(batch, entry, stack) + first * stack.row_stride, stack.row_stride, stack.col_stride,
            rows - first, cols};
  }
  __device__ accumulate_t<T> at(int64_t row, int64_t col) const {
    return row < rows && col < cols ? to_accumulate(data[row * row_stride + col * col_stride]) : accumulate_t<T>{0};
  }
};

constexpr int kGradFmaThreads = 256, kFmaSide = 16, kFmaOwn = kGradTile / kFmaSide;

template <class Acc>
struct FmaShared {
  static constexpr int kDepth = 128 / sizeof(Acc);  // elements of a row that are staged at a time: a line of memory
  static constexpr int kStride = kGradTile + 4;     // whole 16 bytes, and rows do not crowd one bank

  // Two factors of the scores, [depth][row]; or one of the second products, [row][column].
  alignas(16) Acc staged[2 * kDepth][kStride];
  alignas(16) Acc weights[kGradTile][kStride];  // P or dS, [moving row][staying row]
  GradRow<Acc> queries[kGradTile];
};

template <class Acc>
struct alignas(16) Four {
  Acc x[4];
};
template <class Acc>
__device__ Four<Acc> four(const Acc* p) {
  return *reinterpret_cast<const Four<Acc>*>(p);
}

// What a thread owns: rows 4 y ... + 3 and columns 4 x ... + 3 of a tile.
struct FmaThread {
  int x, y;
  static __device__ FmaThread own() {
    return {static_cast<int>(threadIdx.x) % kFmaSide, static_cast<int>(threadIdx.x) / kFmaSide};
  }
};

// sums[r][c] += sum over depth of a[row r] b[row c], from the first element of the rows to the last.
template <class T, class Acc>
__device__ void add_row_products(Acc (&sums)[kFmaOwn][kFmaOwn], FmaShared<Acc>& shared, const TileRows<T>& a,
                                 const TileRows<T>& b) {
  constexpr int kDepth = FmaShared<Acc>::kDepth;
  const FmaThread own = FmaThread::own();
  for (int64_t begin = 0; begin < a.cols; begin += kDepth) {
    __syncthreads();
#pragma unroll 2
    for (int i = static_cast<int>(threadIdx.x); i < kDepth * kGradTile; i += kGradFmaThreads) {
      const int d = i % kDepth, row = i / kDepth;
      shared.staged[d][row] = a.at(row, begin + d);
      shared.staged[kDepth + d][row] = b.at(row, begin + d);
    }
    __syncthreads();
#pragma unroll 4
    for (int d = 0; d < kDepth; ++d) {
      const Four<Acc> x = four(&shared.staged[d][kFmaOwn * own.y]),
                      y = four(&shared.staged[kDepth + d][kFmaOwn * own.x]);
#pragma unroll
      for (int r = 0; r < kFmaOwn; ++r)
#pragma unroll
        for (int c = 0; c < kFmaOwn; ++c) sums[r][c] = fma(x.x[r], y.x[c], sums[r][c]);
    }
  }
}

// The thread's pairs of a tile. Rows stay, columns move: kKeysStay says which of them are the keys.
template <class T, bool kKeysStay>
struct FmaPairs {
  using Acc = accumulate_t<T>;

  Acc scores[kFmaOwn][kFmaOwn], grads[kFmaOwn][kFmaOwn];  // S, dP
  int64_t query, key;                                     // the first of the thread's four
  uint32_t seen;                                          // bit 4 a + b: query a sees key b

  __device__ FmaPairs(const GradRules<T>& rules, int64_t first_query, int64_t first_key, bool masked) {
    const FmaThread own = FmaThread::own();
    query = first_query + kFmaOwn * (kKeysStay ? own.x : own.y);
    key = first_key + kFmaOwn * (kKeysStay ? own.y : own.x);
    seen = masked ? visible(rules) : 0xFFFF;
  }

  __device__ uint32_t visible(const GradRules<T>& rules) const {
    uint32_t bits = 0;
    for (int a = 0; a < kFmaOwn; ++a) {
      if (query + a >= rules.p.queries) break;
      for (int b = 0; b < kFmaOwn; ++b)
        if (key + b < rules.p.keys && rules.sees(query + a, key + b)) bits |= 1u << (4 * a + b);
    }
    return bits;
  }

  __device__ void multiply(FmaShared<Acc>& shared, const TileRows<T>& queries, const TileRows<T>& keys,
                           const TileRows<T>& grad_outputs, const TileRows<T>& values) {
#pragma unroll
    for (int r = 0; r < kFmaOwn; ++r)
#pragma unroll
      for (int c = 0; c < kFmaOwn; ++c) scores[r][c] = grads[r][c] = 0;
    add_row_products(scores, shared, kKeysStay ? keys : queries, kKeysStay ? queries : keys);
    add_row_products(grads, shared, kKeysStay ? values : grad_outputs, kKeysStay ? grad_outputs : values);
  }

  // visit(r, c, terms) for the pairs that there are; `rows`: of the tile's queries.
  template <class Visit>
  __device__ void each(const GradRules<T>& rules, bool drops, const GradRow<Acc>* rows, int64_t first_query,
                       const Visit& visit) {
#pragma unroll
    for (int a = 0; a < kFmaOwn; ++a) {
      const int64_t i = query + a;
      const GradRow<Acc> row = rows[i - first_query];
      const uint32_t kept =
          drops ? HeadDropout(rules.p, rules.entry).kept(i, key / kKeysPerBlock) >> (key % kKeysPerBlock) : 0xFF;
#pragma unroll
      for (int b = 0; b < kFmaOwn; ++b) {
        const int r = kKeysStay ? b : a, c = kKeysStay ? a : b;
        const bool there = i < rules.p.queries && key + b < rules.p.keys;
        visit(r, c,
              there ? rules.terms(row, i, key + b, scores[r][c], grads[r][c], seen >> (4 * a + b) & 1, kept >> b & 1)
                    : GradTerms<Acc>{0, 0, 0});
        keep_order();
      }
    }
  }
};

template <class T>
__device__ void load_rows(const GradRules<T>& rules, int64_t first_query, GradRow<accumulate_t<T>>* rows) {
  if (threadIdx.x < kGradTile) rows[threadIdx.x] = rules.row(first_query + threadIdx.x);
  __syncthreads();
}

}  // namespace mha::cuda
