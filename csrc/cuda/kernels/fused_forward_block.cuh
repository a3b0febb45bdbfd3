// A block of the fused forward on tensor cores: which tiles of keys are visited, and how they come to shared memory.
// While one tile is worked on, the next one is copied.
#pragma once
#include "fused_forward_output.cuh"

namespace mha::cuda {

template <class Shape>
struct ForwardBlock {
  using T = typename Shape::T;
  using Tile = ForwardTile<Shape>;
  static constexpr Way kWay = Shape::kWay;
  static constexpr int kKeys = Shape::kKeys, kHead = Shape::kHead;

  const ForwardCall<float>& call;
  Placement<T>& place;
  const uint32_t shared;
  Tile tile;
  uint32_t buffer = 0;  // 0 or 1: where the tile of keys at hand is, or comes to

  __device__ __forceinline__ ForwardBlock(const ForwardCall<float>& c, Placement<T>& placement, uint32_t shared_memory)
      : call(c), place(placement), shared(shared_memory), tile(c, placement) {}

  __device__ __forceinline__ uint32_t key_tile() const {
    return shared + Shape::kQueryBytes + buffer * 2 * Shape::kKeyBytes;
  }
  __device__ __forceinline__ uint32_t value_tile() const { return key_tile() + Shape::kKeyBytes; }

  // Hidden keys have weight.
  __device__ __forceinline__ bool all_keys() const { return kWay != Way::plain && call.logits.hidden_have_weight; }
  // Keys from here on have no weight, and are not read.
  __device__ __forceinline__ int64_t last_key() const { return all_keys() ? call.p.keys : place.visibility.keys; }

  // Starts the copy of a tile; elements that are not in whole chunks are copied at once.
  template <int kRows, bool kGuarded>
  static __device__ __forceinline__ void copy(uint32_t to, const TileSource<T>& from, bool chunks) {
    if (kWay == Way::plain || chunks) ChunkCopy<T, kRows, kHead>::template run<kGuarded>(to, from);
    else copy_elements<T, kRows, kHead>(to, from);
  }

  __device__ __forceinline__ void load_queries() const {
    const Input& q = call.p.query;
    const TileSource<T> from{place.input(Placement<T>::kQuery) + place.first_query * q.row_stride, q.row_stride,
                             q.col_stride, call.p.queries - place.first_query, place.head_dim};
    copy<Shape::kRows, true>(shared, from, call.query_chunks);
    copy_commit();
  }

  // A tile of keys, and of values if wanted, to the buffer at hand.
  template <bool kGuarded>
  __device__ __forceinline__ void load(uint32_t index, bool with_values = true) const {
    const Input &k = call.p.key, &v = call.p.value;
    const int64_t first = int64_t{index} * kKeys, rows = kGuarded ? last_key() - first : 0;
    const TileSource<T> keys{place.input(Placement<T>::kKey) + first * k.row_stride, k.row_stride, k.col_stride, rows,
                             place.head_dim};
    copy<kKeys, kGuarded>(key_tile(), keys, call.key_chunks);
    if (with_values) {
      const TileSource<T> values{place.input(Placement<T>::kValue) + first * v.row_stride, v.row_stride, v.col_stride,
                                 rows, place.value_dim};
      copy<kKeys, kGuarded>(value_tile(), values, call.value_chunks);
    }
    copy_commit();
  }

  // The buffer that was being filled is full, and nobody reads the other one any more.
  __device__ __forceinline__ void arrive() const {
    copy_wait<0>();
    __syncthreads();
  }

  // What the warp's row lane % kWarpRows sees of a tile.
  __device__ __forceinline__ uint64_t seen_keys(uint32_t index) const {
    const int64_t query = tile.first_query() + threadIdx.x % Shape::kWarpRows, first = int64_t{index} * kKeys;
    if (query >= call.p.queries) return 0;
    const uint64_t bits = range_bits(visible_keys(place.visibility, query), first);
    return place.visibility.mask && bits ? mask_bits<kKeys>(place.visibility, query, first, bits) : bits;
  }

  // The first tile from `index` on of which some query of the block sees a key, or `end`. What is seen of it waits in
  // shared memory for the time when buffer number `where` is worked on. all: wanted in any case.
  __device__ __forceinline__ uint32_t next(uint32_t index, uint32_t end, bool all, uint32_t where) const {
    for (; index < end; ++index) {
      const uint64_t seen = seen_keys(index);
      if (all || !place.visibility.mask || __syncthreads_or(seen != 0)) {
        place.seen[where][threadIdx.x] = seen;
        break;
      }
    }
    return index;
  }

  // Without a mask, tiles that all queries see are visited in a loop of their own. It ends where the next tile is not
  // a whole one, so that copies need no guard. Returns the tile it stopped at.
  __device__ __forceinline__ uint32_t visit_open(uint32_t index) {
    if (index < place.open.begin) return index;
    for (; index < place.open.end; ++index) {
      arrive();
      const uint32_t key = key_tile(), value = value_tile();
      buffer ^= 1;
      load<false>(index + 1);
      typename Tile::Scores s;
      tile.score(s, key);
      tile.template softmax<true>(s, false);
      tile.add(s, value, false);
    }
    return index;
  }

  // step(first key, keys seen, tile of keys, tile of values) for all tiles that are to be visited.
  template <class Step>
  __device__ __forceinline__ void visit(const KeyTiles& tiles, bool all, bool with_values, Step&& step) {
    uint32_t index = next(tiles.begin, tiles.end, all, buffer);
    if (index < tiles.end) load<true>(index, with_values);
    while (index < tiles.end) {
      if (kWay == Way::plain && !place.careful && !place.visibility.mask) {
        index = visit_open(index);
        place.seen[buffer][threadIdx.x] = seen_keys(index);
      }
      const uint32_t following = next(index + 1, tiles.end, all, buffer ^ 1);
      arrive();
      const uint32_t key = key_tile(), value = value_tile();
      const uint64_t seen = place.seen[buffer][threadIdx.x];
      buffer ^= 1;
      if (following < tiles.end) load<true>(following, with_values);
      step(int64_t{index} * kKeys, seen, key, value);
      index = following;
    }
  }

  // Whether the warp has anything to do with a tile.
  __device__ __forceinline__ bool any_seen(uint64_t seen) const { return all_keys() || __any_sync(~0u, seen != 0); }

  // The online softmax over all keys; with kOutput the output as well.
  template <bool kOutput>
  __device__ __forceinline__ void sum_over_keys() {
    const auto step = [&](int64_t first_key, uint64_t seen, uint32_t key, uint32_t value) {
      if (!any_seen(seen)) return;
      typename Tile::Scores s;
      tile.score(s, key);
      tile.to_logits(s, first_key, seen);
      tile.template softmax<kOutput>(s, place.careful);
      if constexpr (kOutput) {
        if constexpr (kWay != Way::plain) tile.drop(s, first_key);
        tile.add(s, value, place.careful);
      }
    };
    visit(place.tiles, all_keys(), kOutput, step);
    tile.add_up_sums();
  }

  // The second pass where weights are returned: all keys once more, now that their sum is known. Weights of keys that
  // nobody sees are zeros, and are written as well.
  __device__ __forceinline__ void write_all_weights() {
    float inverse[Shape::kRowTiles][2];
    inverse_sums(inverse);
    __syncthreads();  // the first pass is done with the buffers
    const auto step = [&](int64_t first_key, uint64_t seen, uint32_t key, uint32_t value) {
      typename Tile::Scores s = {};
      if (any_seen(seen)) {
        tile.score(s, key);
        tile.to_logits(s, first_key, seen);
        tile.normalise(s, inverse, place.careful);
        tile.drop(s, first_key);
        tile.add(s, value, place.careful);
      }
      write_weights(tile, s, first_key);
    };
    visit(KeyTiles{0, static_cast<uint32_t>(ceil_div(call.p.keys, kKeys))}, true, true, step);
  }

  __device__ __forceinline__ void inverse_sums(float (&inverse)[Shape::kRowTiles][2]) const {
#pragma unroll
    for (int m = 0; m < Shape::kRowTiles; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) inverse[m][h] = inverse_sum(tile.row_sum[m][h], call.keep_scale);
  }

  __device__ __forceinline__ void run() {
    load_queries();
    arrive();
    tile.read_queries(shared);
    // A block with far rows (fused_logits.cuh) does it all again, and one whose output is not finite, in case what
    // spoilt it was hidden.
    for (;;) {
      tile.begin();
      if constexpr (kWay == Way::weights) {
        sum_over_keys<false>();
        write_all_weights();
      } else {
        sum_over_keys<true>();
      }
      if (!__syncthreads_or(!tile.is_ordinary()) || place.careful) break;
      __syncthreads();
      if (threadIdx.x == 0) place.careful = true;
      __syncthreads();
    }
    finish();
  }

  __device__ __forceinline__ void finish() {
    if (call.parts > 1) return write_partial(tile);
    float factor[Shape::kRowTiles][2];
    if constexpr (kWay == Way::weights) {
#pragma unroll
      for (int m = 0; m < Shape::kRowTiles; ++m) factor[m][0] = factor[m][1] = 1;
    } else {
      inverse_sums(factor);
    }
    write_output(tile, factor, shared);
    write_row_statistics(tile);
  }
};

template <class T, int kHead, int kRowTiles, Way kWay>
__global__ void __launch_bounds__(kThreads, 1)
    fused_forward_on_tensor_cores(const __grid_constant__ ForwardCall<float> call) {
  using Shape = ForwardShape<T, kHead, kRowTiles, kWay>;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ Placement<T> place;
  static_assert(sizeof place + Shape::kSharedBytes <= kSharedOfBlock);
  place.fill(call, call.first_block + blockIdx.x, Shape::kRows, Shape::kKeys);
  ForwardBlock<Shape> block(call, place, shared_address(shared));
  block.run();
}

}  // namespace mha::cuda
