// A block of the fused backward on tensor cores: which tiles it visits, and how they come to shared memory. While one
// tile is worked on, the next one is copied. No block adds to what another one writes, and each adds in the order of
// its walk: results are the same on every run.
#pragma once
#include "fused_backward_tile.cuh"

namespace mha::cuda {

template <class Shape>
struct GradBlock {
  using T = typename Shape::T;
  using Tile = GradTile<Shape>;
  static constexpr int kHead = Shape::kHead, kMoving = Shape::kMoving;
  static constexpr bool kKeysStay = Shape::kKeysStay;
  static constexpr GradWay kWay = Shape::kWay;

  const GradCall<float>& call;
  const FusedBackward& p;
  unsigned char* const memory;
  const uint32_t shared;
  int64_t head, first_row;  // head: of the queries, or of the keys and values; first_row: that stays
  Tile tile;
  TileSource<T> moving[2];  // Q and dO, or K and V, from their first row on
  const float* rows;        // of the entry's queries, GradRowTiles
  int buffer = 0;

  __device__ __forceinline__ GradBlock(const GradCall<float>& c, unsigned char* m)
      : call(c), p(c.p), memory(m), shared(shared_address(m)), tile(c) {
    const int64_t count = ceil_div(kKeysStay ? p.keys : p.queries, Shape::kRows);
    head = blockIdx.x / count;
    // With causality the first keys and the last queries have the most to do: they come first.
    const int64_t index = blockIdx.x - head * count;
    first_row = (kKeysStay ? index : count - 1 - index) * Shape::kRows;
  }

  __device__ __forceinline__ int stay_offset(int which) const { return which * Shape::kStayBytes; }
  __device__ __forceinline__ int moving_offset(int which) const {
    return 2 * Shape::kStayBytes + buffer * Shape::kBufferBytes + which * Shape::kMovingBytes;
  }
  __device__ __forceinline__ const float* moving_rows() const {
    return reinterpret_cast<const float*>(memory + moving_offset(2));
  }
  __device__ __forceinline__ PairBits& bits() const {
    return *reinterpret_cast<PairBits*>(memory + 2 * Shape::kStayBytes + 2 * Shape::kBufferBytes);
  }

  static __device__ __forceinline__ TileSource<T> from_row(const TileSource<T>& all, int64_t row) {
    return {all.first + row * all.row_stride, all.row_stride, all.col_stride, all.rows - row, all.cols};
  }
  template <int kCount, bool kGuarded>
  static __device__ __forceinline__ void copy(uint32_t to, const TileSource<T>& from, bool chunks) {
    if (kWay == GradWay::plain || chunks) ChunkCopy<T, kCount, kHead>::template run<kGuarded>(to, from);
    else copy_elements<T, kCount, kHead>(to, from);
  }

  __device__ __forceinline__ TileSource<T> source(int64_t entry, const Input& stack, int64_t there,
                                                  int64_t cols) const {
    return {matrix<const T>(p.batch, entry, stack), stack.row_stride, stack.col_stride, there, static_cast<int>(cols)};
  }
  // Keys that are hidden from all queries by their number are not read: they may hold anything.
  __device__ __forceinline__ int64_t last_key(const BatchVisibility& v) const {
    return call.logits.hidden_have_weight ? p.keys : v.keys;
  }

  // What stays, of one entry.
  __device__ __forceinline__ void load_stay(int64_t entry, const BatchVisibility& v) {
    const Input &first = kKeysStay ? p.key : p.query, &second = kKeysStay ? p.value : p.grad_output;
    const int64_t there = kKeysStay ? last_key(v) : p.queries;
    copy<Shape::kRows, true>(shared + stay_offset(0), from_row(source(entry, first, there, p.head_dim), first_row),
                             kKeysStay ? call.key_chunks : call.query_chunks);
    copy<Shape::kRows, true>(shared + stay_offset(1), from_row(source(entry, second, there, p.value_dim), first_row),
                             kKeysStay ? call.value_chunks : call.grad_chunks);
    copy_commit();
    if constexpr (!kKeysStay) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float* from = GradRowTiles{call.rows, p.queries}.at(entry, first_row + tile.warp_row + tile.g + 8 * h);
        tile.row[h] = {from[0], from[kGradTile], from[2 * kGradTile]};
      }
    }
    copy_wait<0>();
    __syncthreads();
    tile.read_stay(shared + stay_offset(0), shared + stay_offset(1));
  }

  __device__ __forceinline__ void place(int64_t entry, const BatchVisibility& v) {
    const Input &first = kKeysStay ? p.query : p.key, &second = kKeysStay ? p.grad_output : p.value;
    const int64_t there = kKeysStay ? p.queries : last_key(v);
    moving[0] = source(entry, first, there, p.head_dim);
    moving[1] = source(entry, second, there, p.value_dim);
    rows = GradRowTiles{call.rows, p.queries}.at(entry, 0);
  }

  // Starts the copy of what moves to the buffer at hand.
  template <bool kGuarded>
  __device__ __forceinline__ void load(int64_t index) const {
    const int64_t row = index * kMoving;
    copy<kMoving, kGuarded>(shared + moving_offset(0), from_row(moving[0], row),
                            kKeysStay ? call.query_chunks : call.key_chunks);
    copy<kMoving, kGuarded>(shared + moving_offset(1), from_row(moving[1], row),
                            kKeysStay ? call.grad_chunks : call.value_chunks);
    if constexpr (kKeysStay) {
      constexpr int kChunks = kMoving / 4;  // 16 bytes of floats
      const int part = static_cast<int>(threadIdx.x) / kChunks, chunk = static_cast<int>(threadIdx.x) % kChunks;
      if (part < 3)
        copy_async(shared + moving_offset(2) + static_cast<int>(threadIdx.x) * 16,
                   rows + row / kGradTile * 3 * kGradTile + part * kGradTile + row % kGradTile + chunk * 4);
    }
    copy_commit();
  }

  // The buffer that was being filled is full, and nobody reads the other one any more.
  static __device__ __forceinline__ void arrive() {
    copy_wait<0>();
    __syncthreads();
  }

  __device__ __forceinline__ TileWalk walk(const BatchVisibility& v) const {
    const bool all = call.logits.hidden_have_weight;
    if constexpr (kKeysStay)
      return query_tiles(v, p.queries, kMoving, first_row, min_of(first_row + Shape::kRows, p.keys), all);
    else return key_tiles(v, p.keys, kMoving, first_row, min_of(first_row + Shape::kRows, p.queries), all);
  }

  // A tile of which pairs may be hidden, or that asks for the rules. Returns at once where no pair counts.
  template <bool kByRules>
  __device__ __forceinline__ void visit_masked(int64_t index, const GradRules<T>& rules, uint32_t first,
                                               uint32_t second, const float* query_rows, bool careful) {
    const int64_t first_query = kKeysStay ? index * kMoving : first_row;
    const int64_t first_key = kKeysStay ? first_row : index * kMoving;
    const PairShare<Shape::kQueries, Shape::kKeys> share;
    const bool any = share.see(bits(), rules.visibility, p.queries, first_query, first_key);
    if (kByRules && rules.dropout.active()) share.keep(bits(), rules.dropout, first_query, first_key);
    if (!__syncthreads_or(any) && !call.logits.hidden_have_weight) return;
    typename Tile::Pairs s, grads;
    tile.template multiply<0>(s, first);
    tile.template multiply<1>(grads, second);
    if constexpr (kByRules) tile.finish_by_rules(s, grads, query_rows, bits(), rules, first_query, first_key);
    else tile.finish_masked(s, grads, query_rows, bits());
    if (careful) tile.template add<true>(s, grads, first, second);
    else tile.template add<false>(s, grads, first, second);
  }

  __device__ __forceinline__ void visit_open(uint32_t first, uint32_t second, const float* query_rows) {
    typename Tile::Pairs s, grads;
    tile.template multiply<0>(s, first);
    tile.template multiply<1>(grads, second);
    tile.finish_open(s, grads, query_rows);
    tile.template add<false>(s, grads, first, second);
  }

  // All tiles of one entry.
  template <bool kCareful>
  __device__ __forceinline__ void visit(int64_t entry) {
    const GradRules<T> rules(call, entry);
    const TileWalk w = walk(rules.visibility);
    if (w.count() == 0) return;
    place(entry, rules.visibility);
    constexpr bool kByRules = kCareful || kWay != GradWay::plain;
    const int64_t masked = kByRules ? w.count() : w.masked();
    __syncthreads();  // nobody reads the buffers any more
    load<true>(w.tile(0));
    int64_t step = 0;
    for (; step < masked; ++step) {
      arrive();
      const uint32_t first = shared + moving_offset(0), second = shared + moving_offset(1);
      const float* query_rows = moving_rows();
      buffer ^= 1;
      if (step + 1 < w.count()) load<true>(w.tile(step + 1));
      visit_masked<kByRules>(w.tile(step), rules, first, second, query_rows, kCareful);
    }
    for (; step < w.count(); ++step) {
      arrive();
      const uint32_t first = shared + moving_offset(0), second = shared + moving_offset(1);
      const float* query_rows = moving_rows();
      buffer ^= 1;
      if (step + 1 < w.count()) load<true>(w.tile(step + 1));
      visit_open(first, second, query_rows);
    }
  }

  template <bool kCareful>
  __device__ __forceinline__ void visit_all() {
    tile.clear();
    const int64_t group = kKeysStay ? p.group : 1;
    for (int64_t i = 0; i < group; ++i) visit<kCareful>(head * group + i);
  }

  __device__ __forceinline__ void run() {
    const int64_t entry = kKeysStay ? head * p.group : head;
    load_stay(entry, visibility_of(p.visibility, p.batch, entry, p.keys));
    visit_all<false>();
    // A block whose sums are not finite does it all again, in case what spoilt them was hidden.
    if (__syncthreads_or(!tile.sums_are_finite())) visit_all<true>();
    if constexpr (kKeysStay) {
      write(tile.score_sums[0], p.grad_key, entry, p.keys, p.head_dim, call.logits.scale);
      write(tile.value_sums[0], p.grad_value, entry, p.keys, p.value_dim, call.keep_scale);
    } else {
      write(tile.score_sums[0], p.grad_query, entry, p.queries, p.head_dim, call.logits.scale);
    }
  }

  __device__ __forceinline__ void write(const float (&sums)[kHead / 8][4], const Output& out, int64_t entry,
                                        int64_t rows_there, int64_t cols, float factor) const {
    if (!out) return;
    T* const to = matrix<T>(p.batch, entry, out);
    const bool pairs =
        out.col_stride == 1 && out.row_stride % 2 == 0 && cols % 2 == 0 && reinterpret_cast<uintptr_t>(to) % 4 == 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t row = first_row + tile.warp_row + tile.g + 8 * h;
      if (row >= rows_there) continue;
      T* const row_to = to + row * out.row_stride;
#pragma unroll
      for (int n = 0; n < kHead / 8; ++n) {
        const int col = n * 8 + 2 * tile.t;
        const uint32_t both = pack<T>(sums[n][2 * h] * factor, sums[n][2 * h + 1] * factor);
        if (pairs) {
          if (col < cols) *reinterpret_cast<uint32_t*>(row_to + col) = both;
        } else {
          if (col < cols) row_to[col * out.col_stride] = {static_cast<uint16_t>(both)};
          if (col + 1 < cols) row_to[(col + 1) * out.col_stride] = {static_cast<uint16_t>(both >> 16)};
        }
      }
    }
  }
};

template <class T, int kHead, bool kKeysStay, GradWay kWay>
__global__ void __launch_bounds__(kThreads)
    fused_backward_on_tensor_cores(const __grid_constant__ GradCall<float> call) {
  extern __shared__ __align__(128) unsigned char memory[];
  GradBlock<GradShape<T, kHead, kKeysStay, kWay>> block(call, memory);
  block.run();
}

}  // namespace mha::cuda
