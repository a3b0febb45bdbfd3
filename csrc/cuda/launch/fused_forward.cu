// The fused forward: which kernel a call goes to, and how the keys are cut into parts.
#include "../../core/finite.h"
#include "../kernels/fused_forward_merge.cuh"
#include "../kernels/fused_tiles.cuh"
#include "../launch.h"
#include "fused_forward_launch.cuh"

namespace mha::cuda {
namespace {

// Few queries of few heads make few blocks; then the keys are cut into parts. Follows from the shape alone, so that the
// order of additions is the same on every machine.
int64_t key_parts(const FusedForward& p) {
  constexpr int64_t kQueries = 64;    // of a block, about
  constexpr int64_t kBlocks = 256;    // two on each multiprocessor of a large GPU: an estimate
  constexpr int64_t kPartKeys = 256;  // below, starting a block and merging its results cost more than they save
  // A returned weight needs the sum over all keys before it can be written.
  if (p.weights) return 1;
  const int64_t blocks = p.batch.count() * ceil_div(p.queries, kQueries);
  if (blocks == 0 || blocks > kBlocks / 2) return 1;
  return max_of(1, min_of(kBlocks / blocks, p.keys / kPartKeys));
}

template <class Acc>
ForwardCall<Acc> make_call(const FusedForward& p) {
  ForwardCall<Acc> call{};
  call.p = p;
  call.logits = Logits<Acc>::of(p);
  call.keep_scale = scale_of_kept<Acc>(p);
  call.parts = p.partials ? key_parts(p) : 1;
  call.query_chunks = lies_in_chunks(p.batch, p.query, p.head_dim);
  call.key_chunks = lies_in_chunks(p.batch, p.key, p.head_dim);
  call.value_chunks = lies_in_chunks(p.batch, p.value, p.value_dim);
  call.output_chunks = lies_in_chunks(p.batch, p.output, p.value_dim);
  return call;
}

template <class T>
cudaError_t merge(const ForwardCall<accumulate_t<T>>& call, cudaStream_t stream) {
  if (call.parts == 1) return cudaSuccess;
  const int64_t rows = call.p.batch.count() * call.p.queries;
  return launch_forward(fused_forward_merge<T>, call, rows, 1, kMergeThreads, 0, stream);
}

template <class T>
cudaError_t general(const FusedForward& p, cudaStream_t stream) {
  const auto call = make_call<accumulate_t<T>>(p);
  const cudaError_t error = forward_general<T>(call, stream);
  return error != cudaSuccess ? error : merge<T>(call, stream);
}

// Without anything but visibility, in rows that are copied in whole chunks.
bool is_plain(const ForwardCall<float>& call) {
  return !call.logits.scaled && dropout_threshold(call.p.dropout) == 0 && call.query_chunks && call.key_chunks &&
         call.value_chunks;
}

template <class T>
cudaError_t on_tensor_cores(const FusedForward& p, cudaStream_t stream) {
  const int64_t size = max_of(p.head_dim, p.value_dim);
  if (size > kLargestHead) return general<T>(p, stream);
  const auto call = make_call<float>(p);
  cudaError_t error;
  if (p.weights) error = forward_weights<T>(call, size, stream);
  else error = is_plain(call) ? forward_plain<T>(call, size, stream) : forward_options<T>(call, size, stream);
  return error != cudaSuccess ? error : merge<T>(call, stream);
}

}  // namespace

// A part of a row takes value_dim + 2: the output not yet divided by the sum, the statistic and the sum.
int64_t forward_partials(const FusedForward& p) {
  const int64_t parts = key_parts(p);
  return parts > 1 ? p.batch.count() * p.queries * parts * (p.value_dim + 2) : 0;
}

cudaError_t fused_forward(const FusedForward& p, cudaStream_t stream) {
  if (p.batch.count() == 0 || p.queries == 0) return cudaSuccess;
  switch (p.dtype) {
    case DType::f64: return general<double>(p, stream);
    case DType::f32: return general<float>(p, stream);
    case DType::bf16: return on_tensor_cores<bfloat16>(p, stream);
    case DType::f16: return on_tensor_cores<float16>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace mha::cuda
