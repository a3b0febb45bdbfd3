// A block of the fused backward on tensor cores: which tiles it visits, and how they come to shared memory. While one
// tile is worked on, the next one is copied. No block adds to what another one writes, and each adds in the order of
// its walk: results are the same on every run.
#pragma once
#include "fused_backward_tile.cuh"

namespace mha::cuda {

// Of a block, in shared memory: registers are short.
struct GradPlace {
  uint32_t head;      // of the queries, or of the keys and values
  int64_t first_row;  // that stays
  bool careful;       // sums were not finite, or rows far: see fused_backward_tile.cuh
};

template <class Shape>
struct GradBlock {
  using T = typename Shape::T;
  using Tile = GradTile<Shape>;
  static constexpr int kHead = Shape::kHead, kMoving = Shape::kMoving;
  static constexpr bool kKeysStay = Shape::kKeysStay;
  static constexpr bool kOptions = Shape::kWay == GradWay::options;
  using Rules = std::conditional_t<kOptions, GradRules<T>, VisibilityRules>;

  const GradCall<float>& call;
  const FusedBackward& p;
  const uint32_t shared;
  GradPlace& place;
  Tile tile;
  const T* moving[2];  // Q and dO, or K and V, of the entry
  int64_t there;       // rows of them; those behind count as zeros
  uint32_t entry;      // at hand
  int buffer = 0;

  __device__ __forceinline__ GradBlock(const GradCall<float>& c, GradPlace& shared_place)
      : call(c), p(c.p), shared(shared_address(memory())), place(shared_place), tile(c) {}

  __device__ __forceinline__ void settle() {
    const uint32_t block = blockIdx.x / Shape::kParts;
    const uint32_t head = block / tiles_of_head(), turn = block - head * tiles_of_head();
    // With causality the first keys and the last queries have the most to do: they come first.
    const int64_t first_row = int64_t{kKeysStay ? turn : tiles_of_head() - 1 - turn} * Shape::kRows;
    if (threadIdx.x == 0) place = {head, first_row, false};
    __syncthreads();
  }

  static __device__ __forceinline__ unsigned char* memory() {
    extern __shared__ __align__(128) unsigned char tiles[];
    return tiles;
  }

  // Fewer than blocks of the grid.
  __device__ __forceinline__ uint32_t tiles_of_head() const {
    return static_cast<uint32_t>(ceil_div(kKeysStay ? p.keys : p.queries, Shape::kRows));
  }

  // Entries that share what stays.
  __device__ __forceinline__ uint32_t group() const { return kKeysStay ? static_cast<uint32_t>(p.group) : 1; }
  __device__ __forceinline__ uint32_t first_entry() const { return place.head * group(); }

  __device__ __forceinline__ int stay_offset(int which) const { return which * Shape::kStayBytes; }
  __device__ __forceinline__ int moving_offset(int which) const {
    return 2 * Shape::kStayBytes + buffer * Shape::kBufferBytes + which * Shape::kMovingBytes;
  }
  __device__ __forceinline__ float* moving_rows() const {
    return reinterpret_cast<float*>(memory() + moving_offset(2));
  }
  __device__ __forceinline__ PairBits& bits() const {
    return *reinterpret_cast<PairBits*>(memory() + 2 * Shape::kStayBytes + 2 * Shape::kBufferBytes);
  }

  template <int kCount>
  static __device__ __forceinline__ void copy(uint32_t to, const TileSource<T>& from, bool chunks) {
    if (!kOptions || chunks) ChunkCopy<T, kCount, kHead>::template run<true>(to, from);
    else copy_elements<T, kCount, kHead>(to, from);
  }

  static __device__ __forceinline__ TileSource<T> source(const T* matrix, const Input& stack, int64_t row,
                                                         int64_t there, int64_t cols) {
    return {matrix + row * stack.row_stride, stack.row_stride, stack.col_stride, there - row, static_cast<int>(cols)};
  }
  // Keys that are hidden from all queries by their number are not read: they may hold anything. (Heads that share keys
  // have one length, unless somebody calls the kernels with others.)
  __device__ __forceinline__ int64_t last_key(const BatchVisibility& v) const {
    const Input& lengths = p.visibility.key_lengths;
    const bool one_length = !lengths || p.group == 1 || lengths.batch_stride[p.batch.ndim - 1] == 0;
    return call.logits.hidden_have_weight || !one_length ? p.keys : v.keys;
  }

  // What stays, of one entry.
  __device__ __forceinline__ void load_stay(int64_t entry, const BatchVisibility& v) {
    const Input &first = kKeysStay ? p.key : p.query, &second = kKeysStay ? p.value : p.grad_output;
    const int64_t there = kKeysStay ? last_key(v) : p.queries;
    copy<Shape::kRows>(shared + stay_offset(0),
                       source(matrix<const T>(p.batch, entry, first), first, place.first_row, there, p.head_dim),
                       kKeysStay ? call.key_chunks : call.query_chunks);
    copy<Shape::kRows>(shared + stay_offset(1),
                       source(matrix<const T>(p.batch, entry, second), second, place.first_row, there, p.value_dim),
                       kKeysStay ? call.value_chunks : call.grad_chunks);
    copy_commit();
    copy_wait<0>();
    __syncthreads();
    tile.read_stay(shared + stay_offset(0));
  }

  // What is known of the queries that stay; of those that move: load().
  __device__ __forceinline__ void load_rows(int64_t entry) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float* from =
          GradRowTiles{call.rows, p.queries}.at(entry, place.first_row + tile.warp_row + tile.g + 8 * h);
      tile.row[h] = {from[kOptions || place.careful ? GradRowTiles::kShift : GradRowTiles::kNearShift],
                     from[GradRowTiles::kInverse], from[GradRowTiles::kDelta]};
    }
  }

  __device__ __forceinline__ const Input& moving_stack(int which) const {
    return which == 0 ? kKeysStay ? p.query : p.key : kKeysStay ? p.grad_output : p.value;
  }

  __device__ __forceinline__ void find_moving(const BatchVisibility& v) {
    moving[0] = matrix<const T>(p.batch, entry, moving_stack(0));
    moving[1] = matrix<const T>(p.batch, entry, moving_stack(1));
    there = kKeysStay ? p.queries : last_key(v);
  }

  // Starts the copy of what moves to the buffer at hand.
  __device__ __forceinline__ void load(int64_t index) const {
    const int64_t row = index * kMoving;
    copy<kMoving>(shared + moving_offset(0), source(moving[0], moving_stack(0), row, there, p.head_dim),
                  kKeysStay ? call.query_chunks : call.key_chunks);
    copy<kMoving>(shared + moving_offset(1), source(moving[1], moving_stack(1), row, there, p.value_dim),
                  kKeysStay ? call.grad_chunks : call.value_chunks);
    if constexpr (kKeysStay) {
      constexpr int kChunks = kMoving / 4;  // 16 bytes of floats
      const int part = static_cast<int>(threadIdx.x) / kChunks, chunk = static_cast<int>(threadIdx.x) % kChunks;
      if (part < 3)
        copy_async(shared + moving_offset(2) + static_cast<int>(threadIdx.x) * 16,
                   GradRowTiles{call.rows, p.queries}.at(entry, row) + chunk * 4 +
                       (kOptions && part == 0 ? GradRowTiles::kShift : GradRowTiles::kNearShift + part * kGradTile));
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
      return query_tiles(v, p.queries, kMoving, place.first_row, min_of(place.first_row + Shape::kRows, p.keys), all);
    else return key_tiles(v, p.keys, kMoving, place.first_row, min_of(place.first_row + Shape::kRows, p.queries), all);
  }

  // The true shifts of queries that move, in place of those that are NaN in far rows.
  __device__ __forceinline__ void take_far_rows(int64_t first_query, float* query_rows) const {
    const int i = static_cast<int>(threadIdx.x);
    if (i < kMoving)
      query_rows[i] = GradRowTiles{call.rows, p.queries}.at(entry, first_query)[GradRowTiles::kShift + i];
  }

  // A tile of which pairs may be hidden, or that asks for the rules.
  __device__ __forceinline__ void visit_masked(int64_t index, const Rules& rules, uint32_t first, uint32_t second,
                                               float* query_rows) {
    const int64_t first_query = kKeysStay ? index * kMoving : place.first_row;
    const int64_t first_key = kKeysStay ? place.first_row : index * kMoving;
    const PairShare<Shape::kQueries, Shape::kKeys> share;
    if constexpr (kOptions)
      if (call.drops) share.keep(bits(), HeadDropout(p, entry), first_query, first_key);
    const bool any = share.see(bits(), rules.visibility, p.queries, first_query, first_key);
    if constexpr (kKeysStay && !kOptions)
      if (place.careful) take_far_rows(first_query, query_rows);
    if (!__syncthreads_or(any) && !call.logits.hidden_have_weight) return;
    typename Tile::Pairs s, grads;
    tile.template multiply<0>(s, first);
    tile.template multiply<1>(grads, second);
    if constexpr (kOptions)
      tile.by_rules(s, grads, query_rows, bits(), rules, first_query, first_key,
                    [&](int n, int e, const GradTerms<float>& terms) {
                      s[0][n][e] = terms.kept;
                      grads[0][n][e] = terms.score_grad;
                    });
    else tile.finish_masked(s, grads, query_rows, bits(), place.careful);
    if (place.careful) tile.add_carefully(s, grads, first, second);
    else tile.add(s, grads, first, second);
  }

  __device__ __forceinline__ void visit_open(uint32_t first, uint32_t second, const float* query_rows) {
    typename Tile::Pairs s, grads;
    tile.template multiply<0>(s, first);
    tile.template multiply<1>(grads, second);
    tile.template finish_open<false>(s, grads, query_rows);
    tile.add(s, grads, first, second);
  }

  // Waits for the tile of `step`, starts the copy of the next one, and calls visit(tiles, query rows).
  template <class Visit>
  __device__ __forceinline__ void take(const TileWalk& w, uint32_t step, const Visit& visit) {
    arrive();
    const uint32_t first = shared + moving_offset(0);
    float* query_rows = moving_rows();
    buffer ^= 1;
    if (step + 1 < w.count()) load(w.tile(step + 1));
    visit(first, first + Shape::kMovingBytes, query_rows);
  }

  // All tiles of one entry.
  __device__ __forceinline__ void visit() {
    const Rules rules(call, entry);
    const TileWalk w = walk(rules.visibility);
    if (w.count() == 0) return;
    find_moving(rules.visibility);
    __syncthreads();  // nobody reads the buffers any more
    load(w.tile(0));
    const uint32_t masked = kOptions || place.careful ? w.count() : w.masked();
    for (uint32_t step = 0; step < masked; ++step)
      take(w, step, [&](uint32_t first, uint32_t second, float* query_rows) {
        visit_masked(w.tile(step), rules, first, second, query_rows);
      });
    if constexpr (!kOptions)
      for (uint32_t step = masked; step < w.count(); ++step)
        take(w, step,
             [&](uint32_t first, uint32_t second, const float* query_rows) { visit_open(first, second, query_rows); });
  }

  __device__ __forceinline__ void visit_all() {
    tile.clear();
    if constexpr (!kKeysStay) load_rows(first_entry());
    for (entry = first_entry(); entry < first_entry() + group(); ++entry) visit();
  }

  __device__ __forceinline__ void run() {
    settle();
    load_stay(first_entry(), visibility_of(p.visibility, p.batch, first_entry(), p.keys));
    for (;;) {
      visit_all();
      if (!__syncthreads_or(!tile.sums_are_finite()) || place.careful) break;
      __syncthreads();
      if (threadIdx.x == 0) place.careful = true;
      __syncthreads();
    }
    if constexpr (kKeysStay) {
      write(tile.score_sums[0], p.grad_key, first_entry(), p.keys, p.head_dim, call.logits.scale);
      write(tile.value_sums[0], p.grad_value, first_entry(), p.keys, p.value_dim, call.keep_scale);
    } else {
      write(tile.score_sums[0], p.grad_query, first_entry(), p.queries, p.head_dim, call.logits.scale);
    }
  }

  __device__ __forceinline__ void write(const float (&sums)[Shape::kColumns / 8][4], const Output& out, int64_t entry,
                                        int64_t rows_there, int64_t cols, float factor) const {
    if (!out) return;
    T* const to = matrix<T>(p.batch, entry, out);
    const bool pairs =
        out.col_stride == 1 && out.row_stride % 2 == 0 && cols % 2 == 0 && reinterpret_cast<uintptr_t>(to) % 4 == 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t row = place.first_row + tile.warp_row + tile.g + 8 * h;
      if (row >= rows_there) continue;
      T* const row_to = to + row * out.row_stride;
#pragma unroll
      for (int n = 0; n < Shape::kColumns / 8; ++n) {
        const int col = Tile::first_column() + n * 8 + 2 * tile.t;
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

// Two blocks of a multiprocessor leave each thread as many registers as an instruction can name. Left alone, the
// compiler may aim at three, and spill.
template <class T, int kHead, bool kKeysStay, GradWay kWay>
__global__ void __launch_bounds__(kThreads, 2)
    fused_backward_on_tensor_cores(const __grid_constant__ GradCall<float> call) {
  using Shape = GradShape<T, kHead, kKeysStay, kWay>;
  __shared__ GradPlace place;
  static_assert(sizeof place + Shape::kSharedBytes <= kSharedOfBlock);
  GradBlock<Shape> block(call, place);
  block.run();
}

}  // namespace mha::cuda
