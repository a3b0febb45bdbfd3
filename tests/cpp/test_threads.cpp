// Kernels run by several threads at once, as csrc/ops/cpu/launch.h does: tasks of one problem shared out over 1 to 5
// threads, in ranges or one by one, must give the same bytes, and ThreadSanitizer must find nothing to report.
#include <atomic>
#include <thread>

#include "../../csrc/core/backward_plan.h"
#include "levels.h"
#include "strided.h"

namespace {

constexpr int kThreads[] = {1, 2, 3, 5};

enum class Share { ranges, one_by_one };

template <class Problem>
void run_on_threads(const cpu::Kernel<Problem>& kernel, const Problem& p, int threads, Share share) {
  const int64_t tasks = kernel.tasks(p);
  std::atomic<int64_t> next{0};
  std::vector<std::thread> workers;
  for (int t = 0; t < threads; ++t)
    workers.emplace_back([&, t] {
      if (share == Share::ranges) return kernel.run(p, tasks * t / threads, tasks * (t + 1) / threads);
      for (int64_t task; (task = next++) < tasks;) kernel.run(p, task, task + 1);
    });
  for (std::thread& worker : workers) worker.join();
}

template <class T>
Stack<T> contiguous(const BatchShape& batch, int64_t rows, int64_t cols) {
  Stack<T> s;
  s.batch = batch, s.rows = rows, s.cols = cols;
  int64_t step = 1;
  s.view.col_stride = step, step *= cols;
  s.view.row_stride = step, step *= rows;
  for (int d = batch.ndim - 1; d >= 0; --d) s.view.batch_stride[d] = step, step *= batch.size[d];
  s.storage.resize(static_cast<size_t>(step));
  s.view.data = s.storage.data();
  return s;
}

// Calls run(threads) for every number of threads; `output` is where it writes.
template <class T, class Run>
void check_same_bytes(const char* what, Stack<T>& output, const Run& run) {
  std::vector<T> first;
  for (const int threads : kThreads) {
    std::fill(output.storage.begin(), output.storage.end(), T{});
    run(threads);
    if (first.empty()) first = output.storage;
    CHECK(std::memcmp(first.data(), output.storage.data(), first.size() * sizeof(T)) == 0,
          "%s, %s, %s: %d threads give other bytes than 1", what, cpu::kernels().isa, test::name_of(kDType<T>),
          threads);
  }
}

template <class T, class Problem>
void check_same(const char* what, const cpu::Kernel<Problem>& kernel, const Problem& p, Stack<T>& output,
                Share share = Share::ranges) {
  check_same_bytes(what, output, [&](int threads) { run_on_threads(kernel, p, threads, share); });
}

template <class T>
void check_type(Random& random) {
  const DType dtype = kDType<T>;
  const cpu::TypeKernels& kernels = cpu::kernels().of(dtype);
  BatchShape batch;
  batch.ndim = 2, batch.size[0] = 2, batch.size[1] = 3;
  const int64_t queries = 70, keys = 131, head_dim = 33;
  Stack<T> query = contiguous<T>(batch, queries, head_dim), key = contiguous<T>(batch, head_dim, keys);
  Stack<T> scores = contiguous<T>(batch, queries, keys), weights = scores, dropped = scores;
  query.fill_normal(random, 1);
  key.fill_normal(random, 1);

  Product product;
  product.dtype = dtype, product.batch = batch;
  product.m = queries, product.n = keys, product.k = head_dim;
  product.a = query.view, product.b = key.view, product.c = scores.output();
  product.alpha = 0.2;
  check_same("product", kernels.product, product, scores);

  SoftmaxForward softmax;
  softmax.dtype = dtype, softmax.batch = batch, softmax.rows = queries, softmax.cols = keys;
  softmax.scores = scores.view, softmax.weights = weights.output();
  softmax.visibility.window_right = 0, softmax.mask_value = -INFINITY;
  check_same("softmax", kernels.softmax_forward, softmax, weights);

  Dropout dropout;
  dropout.dtype = dtype, dropout.batch = batch, dropout.rows = queries, dropout.cols = keys;
  dropout.weights = weights.view, dropout.out = dropped.output();
  const int64_t seed = 7;
  dropout.seed = &seed, dropout.p = 0.3;
  check_same("dropout", kernels.dropout, dropout, dropped);

  SoftmaxBackward backward;
  backward.dtype = dtype, backward.batch = batch, backward.rows = queries, backward.cols = keys;
  backward.weights = weights.view, backward.grad_weights = scores.view;
  Stack<T> grad_scores = contiguous<T>(batch, queries, keys);
  backward.grad_scores = grad_scores.output();
  check_same("softmax backward", kernels.softmax_backward, backward, grad_scores);
}

// Fused attention, causal, two query heads to a key/value head. With `shares_bias` the first batch entries have one in
// common, and there is work enough that its gradient is summed up on the way, in several waves.
template <class T>
void check_fused(Random& random, bool shares_bias = false) {
  using Acc = accumulate_t<T>;
  const int64_t seed = 7;
  const cpu::TypeKernels& kernels = cpu::kernels().of(kDType<T>);
  BatchShape batch, kv_batch;
  batch.ndim = 3, batch.size[0] = 2, batch.size[1] = shares_bias ? 4 : 2, batch.size[2] = 2;
  kv_batch.ndim = 2, kv_batch.size[0] = batch.size[0], kv_batch.size[1] = batch.size[1];
  FusedForward p;
  p.dtype = kDType<T>, p.batch = batch, p.group = 2, p.heads = 2 * batch.size[1];
  p.queries = shares_bias ? 300 : 70, p.keys = shares_bias ? 270 : 131, p.head_dim = 33, p.value_dim = 20;
  p.visibility.window_right = 0, p.mask_value = -INFINITY, p.scale = 0.2, p.dropout = 0.2, p.seed = &seed;
  Stack<T> query = contiguous<T>(batch, p.queries, p.head_dim), key = contiguous<T>(kv_batch, p.keys, p.head_dim);
  Stack<T> value = contiguous<T>(kv_batch, p.keys, p.value_dim), output = contiguous<T>(batch, p.queries, p.value_dim);
  Stack<T> bias = contiguous<T>(batch, p.queries, p.keys);
  Stack<Acc> row_max = contiguous<Acc>(batch, p.queries, 1), row_sum = row_max, delta = row_max;
  for (Stack<T>* x : {&query, &key, &value, &bias}) x->fill_normal(random, 1);
  if (shares_bias) bias.view.batch_stride[0] = 0;
  p.query = query.view, p.key = key.view, p.value = value.view, p.bias = bias.view;
  p.output = output.output(), p.row_max = row_max.output(), p.row_sum = row_sum.output();
  check_same("fused forward", kernels.fused_forward, p, output, Share::one_by_one);

  FusedBackward b;
  static_cast<Attention&>(b) = p;
  Stack<T> grad_query = query, grad_key = key, grad_value = value, grad_bias = bias, grad_output = output;
  grad_output.fill_normal(random, 1);
  b.output = output.view, b.grad_output = grad_output.view, b.row_max = row_max.view, b.row_sum = row_sum.view;
  b.delta = delta.output(), b.grad_query = grad_query.output(), b.grad_bias = grad_bias.output();
  b.grad_key = grad_key.output(), b.grad_value = grad_value.output();
  check_same("fused delta", kernels.fused_delta, b, delta);
  const BackwardPlan plan = backward_plan(b);
  CHECK(plan.has_bias && (plan.series_length == 2) == shares_bias && plan.ranges > 1, "series of %ld in %ld ranges",
        long(plan.series_length), long(plan.ranges));
  std::vector<Acc> workspace(static_cast<size_t>(plan.workspace()));
  b.workspace = workspace.data();
  for (Stack<T>* result : {&grad_query, &grad_key, &grad_value, &grad_bias})
    check_same_bytes("fused backward", *result, [&](int threads) {
      for (b.wave = 0; b.wave < plan.waves(); ++b.wave)
        run_on_threads(kernels.fused_backward, b, threads, Share::one_by_one);
    });
  check_same("fused bias backward", kernels.fused_bias_backward, b, grad_bias, Share::one_by_one);
}

// Several threads, each with a problem of its own, as when Python threads call operators at the same time.
template <class T>
void check_concurrent_calls() {
  std::vector<std::thread> workers;
  for (int t = 0; t < 4; ++t)
    workers.emplace_back([t] {
      Random random(static_cast<uint64_t>(t));
      check_type<T>(random);
      check_fused<T>(random);
    });
  for (std::thread& worker : workers) worker.join();
}

template <class T>
void check_levels() {
  test::on_each_level(kDType<T>, [](const cpu::KernelTable&) {
    Random random;
    check_type<T>(random);
    check_fused<T>(random);
    if (kDType<T> == DType::f32) {
      check_fused<T>(random, true);
      check_concurrent_calls<T>();
    }
  });
}

}  // namespace

int main() {
  check_levels<double>();
  check_levels<float>();
  check_levels<bfloat16>();
  check_levels<float16>();
  return test::summary("threads");
}
