// The gradient of the bias by multiply-adds: fused_bias_grid.cuh.
#pragma once
#include "fused_backward_fma_tile.cuh"
#include "fused_bias_grid.cuh"

namespace mha::cuda {

template <class Acc>
using FmaBiasSums = Acc[kFmaOwn][kFmaOwn];

// sums += dx of one tile of one entry.
template <class T, class Acc>
__device__ void add_bias_tile(FmaBiasSums<Acc>& sums, FmaShared<Acc>& shared, const GradRules<T>& rules, bool drops,
                              int64_t query, int64_t key, bool masked) {
  const FusedBackward& p = rules.p;
  FmaPairs<T, false> pairs(rules, query, key, masked);
  if (!__syncthreads_or(pairs.seen != 0)) return;
  load_rows(rules, query, shared.queries);
  pairs.multiply(shared, TileRows<T>::of(p.batch, rules.entry, p.query, query, p.queries, p.head_dim),
                 TileRows<T>::of(p.batch, rules.entry, p.key, key, p.keys, p.head_dim),
                 TileRows<T>::of(p.batch, rules.entry, p.grad_output, query, p.queries, p.value_dim),
                 TileRows<T>::of(p.batch, rules.entry, p.value, key, p.keys, p.value_dim));
  pairs.each(rules, drops, shared.queries, query,
             [&](int r, int c, const GradTerms<Acc>& terms) { sums[r][c] += terms.logit_grad; });
}

template <class T>
__global__ void __launch_bounds__(kGradFmaThreads)
    fused_bias_fma(const __grid_constant__ GradCall<accumulate_t<T>> call, const __grid_constant__ BiasGrid grid) {
  using Acc = accumulate_t<T>;
  const FusedBackward& p = call.p;
  extern __shared__ __align__(16) unsigned char memory[];
  FmaShared<Acc>& shared = *reinterpret_cast<FmaShared<Acc>*>(memory);
  const BiasShare share = grid.share(p, blockIdx.x);

  FmaBiasSums<Acc> sums = {};
  for (int64_t shares = 0; shares < grid.heads.sharing.count(); ++shares) {
    const GradRules<T> rules(call, grid.heads.entry(share.matrix, shares));
    for (int64_t query = share.query; query < share.end_query; query += kGradTile) {
      const TileWalk walk = grid.walk(p, rules.visibility, share, query);
      for (int64_t tile = walk.first; tile < walk.end; ++tile)
        add_bias_tile(sums, shared, rules, call.drops, query, tile * kGradTile,
                      tile < walk.open_begin || tile >= walk.open_end);
    }
  }
  const FmaThread own = FmaThread::own();
#pragma unroll
  for (int r = 0; r < kFmaOwn; ++r)
#pragma unroll
    for (int c = 0; c < kFmaOwn; ++c) shared.weights[kFmaOwn * own.y + r][kFmaOwn * own.x + c] = sums[r][c];
  __syncthreads();
  grid.write<T>(&shared.weights[0][0], FmaShared<Acc>::kStride, p, share);
}

}  // namespace mha::cuda
