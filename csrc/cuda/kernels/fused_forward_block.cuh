// A block of the fused forward on tensor cores: which tiles of keys are visited, and how they come to shared memory.
// While one tile is worked on, the next one is copied.
#pragma once
#include "fused_forward_output.cuh"

namespace mha::cuda {

// A tile of keys; seen: what the warp's row lane % kWarpRows sees of it.
struct VisitedTile {
  int64_t index;
  uint64_t seen;
};

template <class Shape>
struct ForwardBlock {
  using T = typename Shape::T;
  static constexpr Way kWay = Shape::kWay;
  static constexpr int kKeys = Shape::kKeys, kHead = Shape::kHead;

  const ForwardCall<float>& call;
  const ForwardShare share;
  const int64_t first_query;
  const BatchVisibility visibility;
  const bool all_keys;     // hidden keys have weight
  const int64_t last_key;  // keys from here on have no weight, and are not read
  const uint32_t shared;
  TileSource<T> queries, keys, values;
  T* output;
  KeyRange row_range;  // of the row that this lane looks at for its warp
  int64_t row_query;
  ForwardTile<Shape> tile;
  int buffer = 0;

  __device__ __forceinline__ ForwardBlock(const ForwardCall<float>& c, int64_t block, uint32_t shared_memory)
      : call(c),
        share(c, block),
        first_query(share.tile * Shape::kRows),
        visibility(visibility_of(c.p.visibility, c.p.batch, share.entry, c.p.keys)),
        all_keys(kWay != Way::plain && c.logits.hidden_have_weight),
        last_key(all_keys ? c.p.keys : visibility.keys),
        shared(shared_memory),
        tile(c, share.entry, first_query + threadIdx.x / 32 * Shape::kWarpRows) {
    const FusedForward& p = c.p;
    int64_t at[4] = {};
    const int64_t* const strides[4] = {p.query.batch_stride, p.key.batch_stride, p.value.batch_stride,
                                       p.output.batch_stride};
    entry_offsets(p.batch, share.entry, strides, at);
    queries = {static_cast<const T*>(p.query.data) + at[0] + first_query * p.query.row_stride, p.query.row_stride,
               p.query.col_stride, p.queries - first_query, static_cast<int>(p.head_dim)};
    keys = {static_cast<const T*>(p.key.data) + at[1], p.key.row_stride, p.key.col_stride, last_key,
            static_cast<int>(p.head_dim)};
    values = {static_cast<const T*>(p.value.data) + at[2], p.value.row_stride, p.value.col_stride, last_key,
              static_cast<int>(p.value_dim)};
    output = static_cast<T*>(p.output.data) + at[3];
    row_query = tile.first_query + threadIdx.x % Shape::kWarpRows;
    row_range = row_query < p.queries ? visible_keys(visibility, row_query) : KeyRange{0, 0};
  }

  // Offsets of one entry in several tensors at once: the divisions are made once.
  static __device__ __forceinline__ void entry_offsets(const BatchShape& batch, int64_t entry,
                                                       const int64_t* const (&strides)[4], int64_t (&at)[4]) {
    for (int d = batch.ndim - 1; d >= 0; --d) {
      if (batch.size[d] == 1) continue;
      const int64_t rest = entry / batch.size[d], i = entry - rest * batch.size[d];
#pragma unroll
      for (int n = 0; n < 4; ++n) at[n] += i * strides[n][d];
      entry = rest;
    }
  }

  __device__ __forceinline__ uint32_t key_tile() const {
    return shared + Shape::kQueryBytes + buffer * 2 * Shape::kKeyBytes;
  }
  __device__ __forceinline__ uint32_t value_tile() const { return key_tile() + Shape::kKeyBytes; }

  template <int kRows, bool kGuarded>
  static __device__ __forceinline__ void copy(uint32_t to, const TileSource<T>& from, bool chunks) {
    if (kWay == Way::plain || chunks) ChunkCopy<T, kRows, kHead>::template run<kGuarded>(to, from);
    else copy_elements<T, kRows, kHead>(to, from);
  }

  static __device__ __forceinline__ TileSource<T> from_row(const TileSource<T>& all, int64_t row) {
    return {all.first + row * all.row_stride, all.row_stride, all.col_stride, all.rows - row, all.cols};
  }

  // Starts the copy of a tile of keys, and of values if wanted, to the buffer at hand.
  template <bool kGuarded>
  __device__ __forceinline__ void load(int64_t index, bool with_values = true) const {
    copy<kKeys, kGuarded>(key_tile(), from_row(keys, index * kKeys), call.key_chunks);
    if (with_values) copy<kKeys, kGuarded>(value_tile(), from_row(values, index * kKeys), call.value_chunks);
    copy_commit();
  }

  // The buffer that was being filled is full, and nobody reads the other one any more.
  __device__ __forceinline__ void arrive() const {
    copy_wait<0>();
    __syncthreads();
  }

  __device__ __forceinline__ uint64_t seen_keys(int64_t index) const {
    const int64_t first = index * kKeys;
    uint64_t bits = range_bits(row_range, first);
    if (visibility.mask && bits) bits = mask_bits<kKeys>(visibility, row_query, first, bits);
    return bits;
  }

  // The first tile from `index` on of which some query of the block sees a key, or `end`. all: wanted in any case.
  __device__ __forceinline__ VisitedTile next(int64_t index, int64_t end, bool all) const {
    for (; index < end; ++index) {
      const uint64_t seen = seen_keys(index);
      if (all || !visibility.mask || __syncthreads_or(seen != 0)) return {index, seen};
    }
    return {end, 0};
  }

  // Without a mask, tiles that all queries see are visited in a loop of their own. It ends where the next tile is not
  // a whole one, so that copies need no guard. Returns the tile it stopped at.
  __device__ __forceinline__ int64_t visit_open(int64_t index, const KeyTiles& tiles) {
    const TileReach reach(visibility, first_query, min_of(first_query + Shape::kRows, call.p.queries));
    if (index * kKeys < reach.every.begin) return index;
    const int64_t end = min_of(reach.every.end / kKeys, min_of(last_key / kKeys, tiles.end) - 1);
    for (; index < end; ++index) {
      arrive();
      const uint32_t key = key_tile(), value = value_tile();
      buffer ^= 1;
      load<false>(index + 1);
      typename ForwardTile<Shape>::Scores s;
      tile.score(s, key);
      tile.template softmax<true>(s, false);
      tile.add(s, value, false);
    }
    return index;
  }

  // step(tile, its keys, its values) for all tiles that are to be visited.
  template <class Step>
  __device__ __forceinline__ void visit(const KeyTiles& tiles, bool all, bool with_values, bool open_loop,
                                        Step&& step) {
    VisitedTile at = next(tiles.begin, tiles.end, all);
    if (at.index < tiles.end) load<true>(at.index, with_values);
    while (at.index < tiles.end) {
      if (kWay == Way::plain && open_loop) {
        const int64_t index = visit_open(at.index, tiles);
        if (index != at.index) at = {index, seen_keys(index)};
      }
      const VisitedTile following = next(at.index + 1, tiles.end, all);
      arrive();
      const uint32_t key = key_tile(), value = value_tile();
      buffer ^= 1;
      if (following.index < tiles.end) load<true>(following.index, with_values);
      step(at, key, value);
      at = following;
    }
  }

  __device__ __forceinline__ KeyTiles tiles() const {
    if (all_keys) return KeyTiles::of({0, call.p.keys}, kKeys, share.part, call.parts);
    const TileReach reach(visibility, first_query, min_of(first_query + Shape::kRows, call.p.queries));
    return KeyTiles::of(reach.some, kKeys, share.part, call.parts);
  }

  // Whether the warp has anything to do with a tile.
  __device__ __forceinline__ bool any_seen(const VisitedTile& at) const {
    return all_keys || __any_sync(~0u, at.seen != 0);
  }

  // The online softmax over all keys; with kOutput the output as well.
  template <bool kOutput>
  __device__ __forceinline__ void sum_over_keys(const HeadDropout& dropout, bool careful) {
    visit(tiles(), all_keys, kOutput, !visibility.mask && !careful,
          [&](const VisitedTile& at, uint32_t key, uint32_t value) {
            if (!any_seen(at)) return;
            typename ForwardTile<Shape>::Scores s;
            tile.score(s, key);
            tile.to_logits(s, at.index * kKeys, at.seen);
            tile.template softmax<kOutput>(s, careful);
            if constexpr (kOutput) {
              if (kWay != Way::plain && dropout.active()) tile.drop(s, dropout, at.index * kKeys);
              tile.add(s, value, careful);
            }
          });
    tile.add_up_sums();
  }

  // The second pass where weights are returned: all keys once more, now that their sum is known.
  __device__ __forceinline__ void write_all_weights(const HeadDropout& dropout, bool careful) {
    float inverse[Shape::kRowTiles][2];
    inverse_sums(inverse);
    T* weights = matrix<T>(call.p.batch, share.entry, call.p.weights);
    __syncthreads();  // the first pass is done with the buffers
    visit({0, ceil_div(call.p.keys, kKeys)}, true, true, false,
          [&](const VisitedTile& at, uint32_t key, uint32_t value) {
            typename ForwardTile<Shape>::Scores s = {};
            if (any_seen(at)) {
              tile.score(s, key);
              tile.to_logits(s, at.index * kKeys, at.seen);
              tile.normalise(s, inverse);
              if (dropout.active()) tile.drop(s, dropout, at.index * kKeys);
              tile.add(s, value, careful);
            }
            write_weights(tile, s, weights, at.index * kKeys);
          });
  }

  __device__ __forceinline__ void inverse_sums(float (&inverse)[Shape::kRowTiles][2]) const {
#pragma unroll
    for (int m = 0; m < Shape::kRowTiles; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) inverse[m][h] = inverse_sum(tile.row_sum[m][h], call.keep_scale);
  }

  __device__ __forceinline__ void run() {
    const HeadDropout dropout(call.p, share.entry);
    copy<Shape::kRows, true>(shared, queries, call.query_chunks);
    copy_commit();
    arrive();
    tile.read_queries(shared);
    // A block whose output is not finite does it all again, in case what spoilt it was hidden.
    for (bool careful = false;; careful = true) {
      tile.begin(share.part == 0);
      if constexpr (kWay == Way::weights) {
        sum_over_keys<false>(dropout, careful);
        write_all_weights(dropout, careful);
      } else {
        sum_over_keys<true>(dropout, careful);
      }
      if (!__syncthreads_or(!tile.output_is_finite()) || careful) break;
    }
    finish();
  }

  __device__ __forceinline__ void finish() {
    if (call.parts > 1) return write_partial(tile, share.part);
    float factor[Shape::kRowTiles][2];
    if constexpr (kWay == Way::weights) {
#pragma unroll
      for (int m = 0; m < Shape::kRowTiles; ++m) factor[m][0] = factor[m][1] = 1;
    } else {
      inverse_sums(factor);
    }
    write_output(tile, factor, output, shared);
    write_row_statistics(tile);
  }
};

template <class T, int kHead, int kRowTiles, Way kWay>
__global__ void __launch_bounds__(kThreads)
    fused_forward_on_tensor_cores(const __grid_constant__ ForwardCall<float> call) {
  extern __shared__ __align__(128) unsigned char shared[];
  ForwardBlock<ForwardShape<T, kHead, kRowTiles, kWay>> block(call, call.first_block + blockIdx.x,
                                                              shared_address(shared));
  block.run();
}

}  // namespace mha::cuda
