// The matrix products of every instruction-set level this machine has, against a plain loop in double.
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "../../csrc/core/half.h"
#include "../../csrc/cpu/dispatch/dispatch.h"
#include "check.h"
#include "levels.h"

namespace {

using mha::DType;
using mha::Product;
using test::Random;

// Elements of one dtype, in exactly as many bytes as they need, so that AddressSanitizer sees every step outside.
class Buffer {
 public:
  Buffer(DType dtype, int64_t size) : dtype_(dtype), size_(size), bytes_(size * width(dtype)) {}

  static int64_t width(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }
  int64_t size() const { return size_; }
  void* data() { return bytes_.data(); }
  const void* data() const { return bytes_.data(); }

  double get(int64_t i) const {
    switch (dtype_) {
      case DType::f64: return at<double>(i);
      case DType::f32: return static_cast<double>(at<float>(i));
      case DType::bf16: return static_cast<double>(mha::widen(at<mha::bfloat16>(i)));
      default: return static_cast<double>(mha::widen(at<mha::float16>(i)));
    }
  }
  void set(int64_t i, double x) {
    switch (dtype_) {
      case DType::f64: put<double>(i, x); break;
      case DType::f32: put<float>(i, static_cast<float>(x)); break;
      case DType::bf16: put<mha::bfloat16>(i, mha::narrow<mha::bfloat16>(static_cast<float>(x))); break;
      default: put<mha::float16>(i, mha::narrow<mha::float16>(static_cast<float>(x))); break;
    }
  }
  void fill_uniform(Random& random, double low = -1.0, double high = 1.0) {
    for (int64_t i = 0; i < size_; ++i) set(i, random.uniform(low, high));
  }

 private:
  template <class T>
  T at(int64_t i) const {
    T x;
    std::memcpy(&x, bytes_.data() + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    return x;
  }
  template <class T>
  void put(int64_t i, T x) {
    std::memcpy(bytes_.data() + i * static_cast<int64_t>(sizeof(T)), &x, sizeof(T));
  }

  DType dtype_;
  int64_t size_;
  std::vector<unsigned char> bytes_;
};

// How the elements of a matrix lie in memory.
enum class Layout { rows, columns, padded_rows, padded_columns, spread };

// Gives the strides of a [batch][groups][rows][cols] tensor and returns how many elements it spans.
template <class Pointer>
int64_t lay_out(Layout layout, const Product& p, int64_t groups, int64_t rows, int64_t cols,
                mha::Strided<Pointer>& view, int64_t* group_stride) {
  int64_t span = 0;
  const int64_t pad = layout == Layout::padded_rows || layout == Layout::padded_columns ? 3 : 0;
  switch (layout) {
    case Layout::rows:
    case Layout::padded_rows: view.row_stride = cols + pad, view.col_stride = 1; break;
    case Layout::columns:
    case Layout::padded_columns: view.row_stride = 1, view.col_stride = rows + pad; break;
    case Layout::spread: view.row_stride = 2 * cols + 1, view.col_stride = 2; break;
  }
  const int64_t matrix = rows && cols ? (rows - 1) * view.row_stride + (cols - 1) * view.col_stride + 1 : 0;
  if (group_stride) *group_stride = matrix;
  span = matrix * groups;
  for (int d = p.batch.ndim - 1; d >= 0; --d) {
    view.batch_stride[d] = span;
    span *= p.batch.size[d];
  }
  return span;
}

struct Case {
  DType dtype;
  int64_t batch[2], m, n, k, groups;
  Layout a, b, c;
  double alpha;
  bool zero_hides;
  bool spoiled;  // zeros in A, and NaN and infinity in B where only these zeros meet them

  std::string text() const {
    char s[200];
    std::snprintf(s, sizeof s,
                  "%s batch %ldx%ld m %ld n %ld k %ld groups %ld layouts %d %d %d alpha %g hides %d spoiled %d",
                  test::name_of(dtype), long(batch[0]), long(batch[1]), long(m), long(n), long(k), long(groups), int(a),
                  int(b), int(c), alpha, zero_hides, spoiled);
    return s;
  }
};

class Run {
 public:
  Run(const Case& c, Random& random) : case_(c), a_(c.dtype, 0), b_(c.dtype, 0), out_(c.dtype, 0) {
    p_.dtype = c.dtype;
    p_.batch.ndim = 2;
    p_.batch.size[0] = c.batch[0], p_.batch.size[1] = c.batch[1];
    p_.m = c.m, p_.n = c.n, p_.k = c.k, p_.groups = c.groups;
    p_.alpha = c.alpha, p_.zero_hides = c.zero_hides;
    a_ = Buffer(c.dtype, lay_out(c.a, p_, c.groups, c.m, c.k, p_.a, &p_.a_group_stride));
    b_ = Buffer(c.dtype, lay_out(c.b, p_, c.groups, c.k, c.n, p_.b, &p_.b_group_stride));
    a_.fill_uniform(random);
    b_.fill_uniform(random);
    if (c.spoiled) spoil(random);
    out_ = Buffer(c.dtype, lay_out(c.c, p_, 1, c.m, c.n, p_.c, nullptr));
    p_.a.data = a_.data(), p_.b.data = b_.data(), p_.c.data = out_.data();
    expect();
  }

  // Computes with one level, in two unequal shares of the tasks when `split`, and compares.
  void check(const mha::cpu::KernelTable& table, bool split) {
    const auto& kernel = table.of(case_.dtype).product;
    for (int64_t i = 0; i < out_.size(); ++i) out_.set(i, kUntouched);
    const int64_t tasks = kernel.tasks(p_), middle = split ? tasks / 3 : tasks;
    kernel.run(p_, middle, tasks);
    kernel.run(p_, 0, middle);
    compare(table.isa);
  }

  const Product& problem() const { return p_; }
  const Buffer& out() const { return out_; }

 private:
  static constexpr double kUntouched = 77.0;  // representable in every dtype, and no product reaches it

  int64_t a_index(int64_t z, int64_t y, int64_t g, int64_t i, int64_t k) const {
    return z * p_.a.batch_stride[0] + y * p_.a.batch_stride[1] + g * p_.a_group_stride + i * p_.a.row_stride +
           k * p_.a.col_stride;
  }
  int64_t b_index(int64_t z, int64_t y, int64_t g, int64_t k, int64_t j) const {
    return z * p_.b.batch_stride[0] + y * p_.b.batch_stride[1] + g * p_.b_group_stride + k * p_.b.row_stride +
           j * p_.b.col_stride;
  }
  int64_t c_index(int64_t z, int64_t y, int64_t i, int64_t j) const {
    return z * p_.c.batch_stride[0] + y * p_.c.batch_stride[1] + i * p_.c.row_stride + j * p_.c.col_stride;
  }

  // Every third depth: A is zero there in all rows and B is NaN or infinite.
  void spoil(Random& random) {
    const double bad[] = {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()};
    for (int64_t z = 0; z < p_.batch.size[0]; ++z)
      for (int64_t y = 0; y < p_.batch.size[1]; ++y)
        for (int64_t g = 0; g < p_.groups; ++g)
          for (int64_t k = random.below(3); k < p_.k; k += 3) {
            for (int64_t i = 0; i < p_.m; ++i) a_.set(a_index(z, y, g, i, k), random.pick({0.0, -0.0}));
            for (int64_t j = 0; j < p_.n; ++j) b_.set(b_index(z, y, g, k, j), bad[random.below(2)]);
          }
  }

  void expect() {
    for (int64_t z = 0; z < p_.batch.size[0]; ++z)
      for (int64_t y = 0; y < p_.batch.size[1]; ++y)
        for (int64_t i = 0; i < p_.m; ++i)
          for (int64_t j = 0; j < p_.n; ++j) {
            double sum = 0, magnitude = 0;
            for (int64_t g = 0; g < p_.groups; ++g)
              for (int64_t k = 0; k < p_.k; ++k) {
                const double x = a_.get(a_index(z, y, g, i, k));
                if (p_.zero_hides && x == 0) continue;
                const double term = x * b_.get(b_index(z, y, g, k, j));
                sum += term;
                magnitude += std::fabs(term);
              }
            expected_.push_back(p_.alpha * sum);
            magnitude_.push_back(std::fabs(p_.alpha) * magnitude);
          }
  }

  // Rounding of the result, plus the rounding of each addition (sums are kept in float, for f64 in double): n additions
  // in blocks err by far less than n * epsilon * sum |term|, the bound of any order.
  double bound(double expected, double magnitude) const {
    const double sums = test::epsilon(case_.dtype == DType::f64 ? DType::f64 : DType::f32);
    const double additions = static_cast<double>(p_.k * p_.groups + 2);
    const double subnormal = case_.dtype == DType::f16 ? 0x1p-24 : 0;
    return 0.5 * test::epsilon(case_.dtype) * std::fabs(expected) + additions * sums * magnitude + subnormal;
  }

  void compare(const std::string& isa) {
    size_t at = 0;
    std::vector<bool> written(static_cast<size_t>(out_.size()));
    for (int64_t z = 0; z < p_.batch.size[0]; ++z)
      for (int64_t y = 0; y < p_.batch.size[1]; ++y)
        for (int64_t i = 0; i < p_.m; ++i)
          for (int64_t j = 0; j < p_.n; ++j, ++at) {
            const int64_t index = c_index(z, y, i, j);
            written[static_cast<size_t>(index)] = true;
            const double got = out_.get(index), want = expected_[at];
            CHECK(std::fabs(got - want) <= bound(want, magnitude_[at]), "%s %s: [%ld %ld %ld %ld] is %g, expected %g",
                  isa.c_str(), case_.text().c_str(), long(z), long(y), long(i), long(j), got, want);
          }
    for (int64_t i = 0; i < out_.size(); ++i)
      CHECK(written[static_cast<size_t>(i)] || out_.get(i) == kUntouched, "%s %s: wrote between the elements at %ld",
            isa.c_str(), case_.text().c_str(), long(i));
  }

  Case case_;
  Product p_;
  Buffer a_, b_, out_;
  std::vector<double> expected_, magnitude_;
};

void check_levels(const Case& c, Random& random) {
  Run run(c, random);
  test::on_each_level(c.dtype, [&](const mha::cpu::KernelTable& table) {
    run.check(table, false);
    run.check(table, true);
  });
}

constexpr DType kAll[] = {DType::f64, DType::f32, DType::bf16, DType::f16};
constexpr Layout kLayouts[] = {Layout::rows, Layout::columns, Layout::padded_rows, Layout::padded_columns,
                               Layout::spread};

// Sizes around the tiles of every level, every layout, with and without hidden NaN.
void random_cases(int count) {
  Random random(1);
  for (int i = 0; i < count; ++i)
    for (DType dtype : kAll) {
      Case c;
      c.dtype = dtype;
      c.batch[0] = random.pick<int64_t>({1, 1, 2}), c.batch[1] = random.pick<int64_t>({1, 3});
      c.m = random.pick<int64_t>({1, 2, 5, 7, 16, 31, 33, 50, 64, 100});
      c.n = random.pick<int64_t>({1, 3, 4, 8, 15, 17, 33, 48, 64, 70, 130});
      c.k = random.pick<int64_t>({1, 2, 3, 15, 16, 31, 32, 33, 64, 80, 129, 300});
      c.groups = random.pick<int64_t>({1, 1, 1, 2, 3});
      c.a = kLayouts[random.below(5)], c.b = kLayouts[random.below(5)], c.c = kLayouts[random.below(5)];
      c.alpha = random.pick({1.0, 0.125, -1.5});
      c.zero_hides = random.below(2);
      c.spoiled = c.zero_hides && random.below(2);
      check_levels(c, random);
    }
}

// Empty outputs stay untouched; an empty sum is zero.
void zero_sizes() {
  Random random(2);
  for (DType dtype : kAll)
    for (int empty = 0; empty < 5; ++empty) {
      Case c = {dtype, {2, 1}, 5, 20, 40, 1, Layout::rows, Layout::rows, Layout::rows, 1.0, false, false};
      int64_t* sizes[] = {&c.batch[1], &c.m, &c.n, &c.k, &c.groups};
      *sizes[empty] = 0;
      check_levels(c, random);
    }
}

// Depths of several blocks, rows and columns of several tasks.
void large_cases() {
  Random random(3);
  for (DType dtype : kAll)
    for (bool spoiled : {false, true}) {
      check_levels({dtype, {1, 1}, 530, 70, 600, 1, Layout::rows, Layout::rows, Layout::rows, 1.0, true, spoiled},
                   random);
      check_levels({dtype, {1, 1}, 70, 300, 530, 2, Layout::columns, Layout::rows, Layout::rows, 0.5, true, spoiled},
                   random);
    }
}

// One product alone gives every thread of a large machine's half socket something to do.
void single_product_is_cut() {
  Random random(4);
  for (const std::string& isa : mha::cpu::supported_isas()) {
    mha::cpu::set_isa(isa);
    for (DType dtype : kAll) {
      Product p;
      p.dtype = dtype;
      p.m = p.n = 2048, p.k = 64;
      const int64_t scores = mha::cpu::kernels().of(dtype).product.tasks(p);
      CHECK(scores >= 8, "%s %s: %ld tasks", isa.c_str(), test::name_of(dtype), long(scores));
      p.n = 64, p.k = 2048;
      const int64_t sums = mha::cpu::kernels().of(dtype).product.tasks(p);
      CHECK(sums >= 8, "%s %s: %ld tasks", isa.c_str(), test::name_of(dtype), long(sums));
    }
  }
}

// NaN and infinity that no zero hides come through.
void bad_numbers_come_through() {
  const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  for (const std::string& isa : mha::cpu::supported_isas()) {
    mha::cpu::set_isa(isa);
    for (DType dtype : kAll)
      for (bool zero_hides : {false, true}) {
        // Row 0 of A: (1, 0); row 1: (0, 1); B: column 0 (NaN, 1), column 1 (1, inf), column 2 (2, 3).
        Buffer a(dtype, 4), b(dtype, 6), c(dtype, 6);
        const double a_values[] = {1, 0, 0, 1}, b_values[] = {nan, 1, 2, 1, inf, 3};
        for (int i = 0; i < 4; ++i) a.set(i, a_values[i]);
        for (int i = 0; i < 6; ++i) b.set(i, b_values[i]);
        Product p;
        p.dtype = dtype, p.m = 2, p.n = 3, p.k = 2, p.zero_hides = zero_hides;
        p.a.data = a.data(), p.a.row_stride = 2, p.a.col_stride = 1;
        p.b.data = b.data(), p.b.row_stride = 3, p.b.col_stride = 1;
        p.c.data = c.data(), p.c.row_stride = 3, p.c.col_stride = 1;
        const auto& kernel = mha::cpu::kernels().of(dtype).product;
        kernel.run(p, 0, kernel.tasks(p));
        const double hidden[] = {nan, 1, 2, 1, inf, 3}, plain[] = {nan, nan, 2, nan, inf, 3};
        for (int i = 0; i < 6; ++i) {
          const double want = (zero_hides ? hidden : plain)[i], got = c.get(i);
          CHECK(got == want || (got != got && want != want), "%s %s hides %d: [%d] is %g, expected %g", isa.c_str(),
                test::name_of(dtype), zero_hides, i, got, want);
        }
      }
  }
}

}  // namespace

int main() {
  random_cases(300);
  zero_sizes();
  large_cases();
  single_product_is_cut();
  bad_numbers_come_through();
  return test::summary("test_products");
}
