// The gradient of the bias on tensor cores: fused_bias_grid.cuh. The tiles are those of dQ with all options
// (fused_backward_block.cuh), and so P is what the forward has summed.
#pragma once
#include "fused_backward_block.cuh"
#include "fused_bias_grid.cuh"

namespace mha::cuda {

template <class Shape>
struct BiasBlock {
  using T = typename Shape::T;
  using Pairs = typename GradTile<Shape>::Pairs;
  static constexpr int kKeys = Shape::kMoving, kStride = kKeys + 4;  // neighbouring rows begin in different banks

  GradBlock<Shape> block;
  const BiasGrid& grid;
  BiasShare& share;  // in shared memory: registers are short
  float sums[kKeys / 8][4] = {};

  __device__ __forceinline__ BiasBlock(const GradCall<float>& call, const BiasGrid& g, GradPlace& place,
                                       BiasShare& shared_share)
      : block(call, place), grid(g), share(shared_share) {}

  // sums += dx of one tile.
  __device__ __forceinline__ void add(const GradRules<T>& rules, int64_t query, int64_t key, uint32_t keys,
                                      uint32_t values) {
    const PairShare<kGradTile, kKeys> pairs;
    if (block.call.drops) pairs.keep(block.bits(), HeadDropout(block.p, block.entry), query, key);
    const bool any = pairs.see(block.bits(), rules.visibility, block.p.queries, query, key);
    if (!__syncthreads_or(any)) return;
    Pairs s, grads;
    block.tile.template multiply<0>(s, keys);
    block.tile.template multiply<1>(grads, values);
    block.tile.by_rules(s, grads, nullptr, block.bits(), rules, query, key,
                        [&](int n, int e, const GradTerms<float>& terms) { sums[n][e] += terms.logit_grad; });
  }

  // kGradTile queries of one entry, and the keys of the block's share.
  __device__ __forceinline__ void visit(const GradRules<T>& rules, int64_t query) {
    TileWalk walk = grid.walk(block.p, rules.visibility, share, query);
    if (walk.count() == 0) return;
    walk.open_begin = walk.open_end = walk.end;  // in order
    __syncthreads();                             // nobody reads the tiles any more
    if (threadIdx.x == 0) block.place.first_row = query;
    __syncthreads();
    block.load_stay(block.entry, rules.visibility);
    block.load_rows(block.entry);
    block.find_moving(rules.visibility);
    block.load(walk.tile(0));
    for (uint32_t step = 0; step < walk.count(); ++step)
      block.take(walk, step, [&](uint32_t keys, uint32_t values, const float*) {
        add(rules, query, walk.tile(step) * kKeys, keys, values);
      });
  }

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) share = grid.share(block.p, blockIdx.x);
    __syncthreads();
    for (int64_t shares = 0; shares < grid.heads.sharing.count(); ++shares) {
      block.entry = static_cast<uint32_t>(grid.heads.entry(share.matrix, shares));
      const GradRules<T> rules(block.call, block.entry);
      for (int64_t query = share.query; query < share.end_query; query += kGradTile) visit(rules, query);
    }
    __syncthreads();
    float* const staged = reinterpret_cast<float*>(block.memory());
    const auto& tile = block.tile;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        staged[(tile.warp_row + tile.g + e / 2 * 8) * kStride + n * 8 + 2 * tile.t + e % 2] = sums[n][e];
    __syncthreads();
    grid.write<T>(staged, kStride, block.p, share);
  }
};

template <class T, int kHead>
using BiasShape = GradShape<T, kHead, false, GradWay::options>;

template <class T, int kHead>
__global__ void __launch_bounds__(kThreads, 2)
    fused_bias_on_tensor_cores(const __grid_constant__ GradCall<float> call, const __grid_constant__ BiasGrid grid) {
  using Shape = BiasShape<T, kHead>;
  using Block = BiasBlock<Shape>;
  __shared__ GradPlace place;
  __shared__ BiasShare share;
  static_assert(sizeof place + sizeof share + Shape::kSharedBytes <= kSharedOfBlock);
  static_assert(kGradTile * Block::kStride * sizeof(float) <= Shape::kSharedBytes);  // the sums, in the tiles' place
  Block block(call, grid, place, share);
  block.run();
}

}  // namespace mha::cuda
