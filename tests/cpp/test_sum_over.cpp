// sum_over through the kernel tables: random shapes, strides and summed dimensions against long double, in one phase
// and in two, the same bits for any order of the tasks.
#include "../../csrc/core/sum_plan.h"
#include "levels.h"
#include "strided.h"

namespace {

struct Dims {
  std::vector<int64_t> sizes, x_strides, out_strides;
  int64_t x_size = 1, out_size = 1;
};

// Dimensions in random order in memory; `summed` ones have stride 0 in the output.
Dims make_dims(Random& random, std::vector<int64_t> sizes, const std::vector<bool>& summed, bool shuffle) {
  Dims d;
  const size_t n = sizes.size();
  d.sizes = sizes;
  d.x_strides.resize(n), d.out_strides.resize(n);
  std::vector<size_t> order(n);
  std::iota(order.begin(), order.end(), size_t{0});
  if (shuffle) random.shuffle(order);
  if (shuffle && random.chance(0.3)) d.x_size = 2;  // no unit stride
  for (size_t k = n; k-- > 0;) {
    const size_t i = order[k];
    if (!(shuffle && random.chance(0.1))) {  // else: x is broadcast along this dimension
      d.x_strides[i] = d.x_size;
      d.x_size = d.x_size * std::max<int64_t>(sizes[i], 1) + (shuffle && random.chance(0.2) ? 3 : 0);
    }
    if (!summed[i]) {
      d.out_strides[i] = d.out_size;
      d.out_size *= std::max<int64_t>(sizes[i], 1);
    }
  }
  return d;
}

int64_t offset_of(int64_t flat, const Dims& d, const std::vector<int64_t>& strides) {
  int64_t offset = 0;
  for (size_t i = d.sizes.size(); i-- > 0; flat /= d.sizes[i]) offset += flat % d.sizes[i] * strides[i];
  return offset;
}

template <class T>
void test_sum(Random& random, const cpu::KernelTable& table, const Dims& d) {
  using Acc = accumulate_t<T>;
  const int type = static_cast<int>(kDType<T>);
  std::vector<T> x(static_cast<size_t>(d.x_size)), out(static_cast<size_t>(d.out_size)), other = out;
  for (T& v : x) v = narrow<T>(static_cast<Acc>(random.normal() + 0.5));
  SumOver p;
  p.dtype = kDType<T>;
  p.shape.ndim = static_cast<int>(d.sizes.size());
  std::copy(d.sizes.begin(), d.sizes.end(), p.shape.size);
  std::copy(d.x_strides.begin(), d.x_strides.end(), p.x.batch_stride);
  std::copy(d.out_strides.begin(), d.out_strides.end(), p.out.batch_stride);
  p.x.data = x.data();

  std::vector<long double> sum(out.size()), size(out.size());
  const int64_t count = p.shape.count();
  for (int64_t i = 0; i < count; ++i) {
    const long double v = widen(x[static_cast<size_t>(offset_of(i, d, d.x_strides))]);
    const size_t o = static_cast<size_t>(offset_of(i, d, d.out_strides));
    sum[o] += v, size[o] += fabsl(v);
  }
  const auto check = [&](const char* phases) {
    for (size_t o = 0; o < out.size(); ++o) {
      // At most some 32 + 16 + 16 additions in a row besides the pairwise ones, of which there are up to 30.
      const double error = static_cast<double>(size[o]) * epsilon<Acc>() * 50;
      const double expected = static_cast<double>(sum[o]), got = widen(out[o]);
      CHECK(std::fabs(got - expected) <= error + 0.505 * epsilon<T>() * std::fabs(expected) + kTiny<T>,
            "%s type %d in %s: sum %zu of %zu over %ld is %.17g, not %.17g", table.isa, type, phases, o, out.size(),
            long(count), got, expected);
    }
  };

  p.out.data = out.data();
  const auto& kernel = table.of(kDType<T>).sum_over;
  std::vector<double> partials(static_cast<size_t>(sum_partials(p)));
  if (count || d.out_size == 1) {
    run_in_pieces(random, kernel, p);
    check("one phase");
  }
  if (partials.empty()) return;
  for (auto* target : {&out, &other}) {
    std::fill(target->begin(), target->end(), narrow<T>(Acc(77)));
    p.out.data = target->data();
    p.partials = partials.data();
    run_in_pieces(random, kernel, p);
    run_in_pieces(random, table.of(kDType<T>).sum_partials, p);
  }
  check("two phases");
  CHECK(std::memcmp(out.data(), other.data(), out.size() * sizeof(T)) == 0, "%s: sums depend on the order", table.isa);
}

template <class T>
void test_level(const cpu::KernelTable& table, int rounds) {
  Random random;
  for (int i = 0; i < rounds; ++i) {
    std::vector<int64_t> sizes;
    std::vector<bool> summed;
    for (int64_t n = random.integer(0, 5); n > 0; --n) {
      const int64_t some[] = {1, 2, 3, 5, 8, 16, 33};
      sizes.push_back(random.chance(0.02)   ? 0
                      : random.chance(0.03) ? random.integer(500, 1500)
                                            : some[random.integer(0, 6)]);
      summed.push_back(random.chance(0.5));
    }
    int64_t count = 1;
    for (int64_t s : sizes) count *= s;
    if (count > 200000) continue;
    test_sum<T>(random, table, make_dims(random, sizes, summed, random.chance(0.7)));
  }
  // The shapes of bias gradients: (batch, heads, queries, keys) over what broadcasts.
  for (unsigned bits = 0; bits < 16; ++bits) {
    const std::vector<bool> summed{bool(bits & 1), bool(bits & 2), bool(bits & 4), bool(bits & 8)};
    test_sum<T>(random, table, make_dims(random, {3, 4, 65, 129}, summed, false));
  }
}

template <class T>
void test_type(int rounds) {
  test::on_each_level(kDType<T>, [&](const cpu::KernelTable& table) { test_level<T>(table, rounds); });
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 300;
  test_type<double>(rounds);
  test_type<float>(rounds);
  test_type<bfloat16>(rounds);
  test_type<float16>(rounds);
  return test::summary("sum_over");
}
