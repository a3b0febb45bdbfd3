// Where a block of the fused forward finds what is its own. It is worked out once and kept in shared memory: registers
// are for tiles.
#pragma once
#include "fused_forward_call.cuh"

namespace mha::cuda {

template <class T>
struct Placement {
  using Acc = accumulate_t<T>;
  // In this order the threads of the first warp work out the addresses.
  enum Tensor { kQuery, kKey, kValue, kBias, kSink, kOutput, kWeights, kRowMax, kRowSum, kTensors };

  int64_t entry, first_query, part;
  BatchVisibility visibility;
  KeyTiles tiles;  // of keys, for the block to visit
  KeyTiles open;   // those of them that all queries see, but for a mask, and behind which comes another whole one
  HeadDropout dropout;
  // As the call has them. Read from here, what follows from them is not kept in registers from tile to tile.
  int head_dim, value_dim;
  bool careful;             // far rows (fused_logits.cuh) or values that are not finite (fused_values.cuh) were met
  uint64_t seen[2][128];    // on tensor cores: of the thread's row, one bit per key of the tile in either buffer
  void* address[kTensors];  // of the entry's matrix (of the sink itself); null: the call has none

  // By all threads of the block, of which there is more than one warp; ends in a barrier. rows: queries of a block;
  // keys: of a tile.
  __device__ __forceinline__ void fill(const ForwardCall<Acc>& c, int64_t block, int rows, int keys) {
    const ForwardShare share(c, block);
    const int thread = threadIdx.x;
    if (thread < kTensors) {
      int size;
      const int64_t* strides;
      char* const data = static_cast<char*>(find(c.p, thread, strides, size));
      address[thread] = data ? data + batch_offset(c.p.batch, share.entry, strides) * size : nullptr;
    } else if (thread == 32) {
      entry = share.entry;
      first_query = share.tile * rows;
      part = share.part;
      visibility = visibility_of(c.p.visibility, c.p.batch, share.entry, c.p.keys);
      dropout = HeadDropout(c.p, share.entry);
      head_dim = static_cast<int>(c.p.head_dim);
      value_dim = static_cast<int>(c.p.value_dim);
      careful = false;
      const TileReach reach(visibility, first_query, min_of(first_query + rows, c.p.queries));
      tiles = KeyTiles::of(c.logits.hidden_have_weight ? KeyRange{0, c.p.keys} : reach.some, keys, part, c.parts);
      const int64_t whole_end = min_of(tiles.end, visibility.keys / keys);
      open.begin = static_cast<uint32_t>(ceil_div(reach.every.begin, keys));
      open.end = static_cast<uint32_t>(max_of(0, min_of(reach.every.end / keys, whole_end - 1)));
    }
    __syncthreads();
  }

  template <class Pointer>
  static __device__ __forceinline__ void* look_up(const Strided<Pointer>& t, const int64_t*& strides) {
    strides = t.batch_stride;
    return const_cast<void*>(static_cast<const void*>(t.data));
  }

  // A tensor of the call, its strides and the size of its elements.
  static __device__ __forceinline__ void* find(const FusedForward& p, int tensor, const int64_t*& strides, int& size) {
    size = sizeof(T);
    switch (tensor) {
      case kQuery: return look_up(p.query, strides);
      case kKey: return look_up(p.key, strides);
      case kValue: return look_up(p.value, strides);
      case kBias: return look_up(p.bias, strides);
      case kSink: return look_up(p.sinks, strides);
      case kOutput: return look_up(p.output, strides);
      case kWeights: return look_up(p.weights, strides);
      default: break;
    }
    size = sizeof(Acc);
    return tensor == kRowMax ? look_up(p.row_max, strides) : look_up(p.row_sum, strides);
  }

  __device__ __forceinline__ const T* input(Tensor t) const { return static_cast<const T*>(address[t]); }
  __device__ __forceinline__ T* result(Tensor t) const { return static_cast<T*>(address[t]); }

  // The logit of the sink; -inf: none. Part 0 of the keys has it.
  __device__ __forceinline__ Acc sink() const {
    return address[kSink] && part == 0 ? to_accumulate(*input(kSink)) : Logits<Acc>::kMinusInfinity;
  }

  __device__ __forceinline__ void write_statistics(const FusedForward& p, int64_t query,
                                                   const RowStatistics<Acc>& row) const {
    static_cast<Acc*>(address[kRowMax])[query * p.row_max.row_stride] = row.max;
    static_cast<Acc*>(address[kRowSum])[query * p.row_sum.row_stride] = row.sum;
  }
};

}  // namespace mha::cuda
