// exp.inl on every level this machine has: the largest errors that its header states, in units in the last place, and
// the values that have to be exact.
#include <cfloat>
#include <limits>
#include <vector>

#include "../../csrc/cpu/dispatch/cpu_features.h"
#include "../../csrc/cpu/isa/baseline.h"
#include "check.h"

namespace mha::cpu {

// One function of one level over an array.
template <class T>
using Map = void (*)(const T* x, T* y, int64_t n);

struct Functions {
  const char* isa;
  Map<float> exp_f32, tanh_f32, slope_f32;
  Map<double> exp_f64, tanh_f64, slope_f64;
};

#define MHA_TEST_MAP(name, T, f)                                                      \
  void name(const T* x, T* y, int64_t n) {                                            \
    for (int64_t i = 0; i < n; i += kLanes<T>) store<T>(y + i, f<T>(load<T>(x + i))); \
  }
#define MHA_TEST_MAPS                            \
  MHA_TEST_MAP(exp_f32, float, exp_nonpositive)  \
  MHA_TEST_MAP(tanh_f32, float, vec_tanh)        \
  MHA_TEST_MAP(slope_f32, float, tanh_slope)     \
  MHA_TEST_MAP(exp_f64, double, exp_nonpositive) \
  MHA_TEST_MAP(tanh_f64, double, vec_tanh)       \
  MHA_TEST_MAP(slope_f64, double, tanh_slope)

namespace generic {
namespace {
#include "../../csrc/cpu/simd/vec_generic.h"
// clang-format off
#include "../../csrc/cpu/simd/vec.h"
#include "../../csrc/cpu/kernels/exp.inl"
// clang-format on
MHA_TEST_MAPS
}  // namespace
}  // namespace generic

#if defined(__x86_64__)
MHA_TARGET("avx2,fma,f16c")
namespace avx2 {
namespace {
#include "../../csrc/cpu/simd/vec_avx2.h"
// clang-format off
#include "../../csrc/cpu/simd/vec.h"
#include "../../csrc/cpu/kernels/exp.inl"
// clang-format on
MHA_TEST_MAPS
}  // namespace
}  // namespace avx2
MHA_TARGET_END

MHA_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
namespace avx512 {
namespace {
#include "../../csrc/cpu/simd/vec_avx512.h"
// clang-format off
#include "../../csrc/cpu/simd/vec.h"
#include "../../csrc/cpu/kernels/exp.inl"
// clang-format on
MHA_TEST_MAPS
}  // namespace
}  // namespace avx512
MHA_TARGET_END
#endif

namespace {

#define MHA_TEST_FUNCTIONS(isa) \
  {#isa, isa::exp_f32, isa::tanh_f32, isa::slope_f32, isa::exp_f64, isa::tanh_f64, isa::slope_f64}
const Functions kLevels[] = {MHA_TEST_FUNCTIONS(generic),
#if defined(__x86_64__)
                             MHA_TEST_FUNCTIONS(avx2), MHA_TEST_FUNCTIONS(avx512)
#endif
};

long double exp_reference(long double x) { return expl(x); }
long double tanh_reference(long double x) { return tanhl(x); }
long double slope_reference(long double x) {
  const long double c = coshl(x);
  return 1 / (c * c);
}

// Distance in units of the last place of T at the reference's size.
template <class T>
double ulps(T got, long double reference) {
  const T rounded = static_cast<T>(fabsl(reference));
  const long double unit = std::nextafter(rounded, std::numeric_limits<T>::infinity()) - rounded;
  return static_cast<double>(fabsl(got - reference) / unit);
}

template <class T>
void check_error(const char* isa, const char* name, Map<T> f, long double (*reference)(long double), double from,
                 double to, double most) {
  std::vector<T> x, y;
  constexpr int kSteps = 1 << 18;
  for (int i = 0; i < kSteps; ++i) x.push_back(static_cast<T>(from + (to - from) * i / kSteps));
  for (int i = 0; i < kSteps; ++i) x.push_back(static_cast<T>(to * std::pow(2.0, -30.0 * i / kSteps)));  // near zero
  y.resize(x.size());
  f(x.data(), y.data(), static_cast<int64_t>(x.size()));
  double worst = 0;
  T at = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double error = ulps(y[i], reference(x[i]));
    if (!(error <= worst)) worst = error, at = x[i];
  }
  std::printf("%-8s %-10s of %zu bytes: largest error %.3f ulp\n", isa, name, sizeof(T), worst);
  CHECK(worst <= most, "%s %s: error %g ulp at %.17g, at most %g are promised", isa, name, worst, double(at), most);
}

template <class T>
void check_special(const char* isa, Map<T> exp, Map<T> tanh, Map<T> slope) {
  constexpr T inf = std::numeric_limits<T>::infinity(), big = std::numeric_limits<T>::max();
  constexpr int n = 16;
  T x[n] = {0, -inf, std::numeric_limits<T>::quiet_NaN(), -big, sizeof(T) == 4 ? T(-87.5) : T(-709)}, y[n];
  const uint64_t payload = sizeof(T) == 4 ? 0x7FC12345u : 0x7FF8123456789ABCu;
  std::memcpy(&x[5], &payload, sizeof(T));
  exp(x, y, n);
  CHECK(y[0] == 1 && y[1] == 0 && y[2] != y[2] && y[3] == 0 && y[4] == 0 && y[5] != y[5], "%s exp", isa);
  x[3] = big, x[4] = inf;
  tanh(x, y, n);
  CHECK(y[0] == 0 && y[1] == -1 && y[2] != y[2] && y[3] == 1 && y[4] == 1 && y[5] != y[5], "%s tanh", isa);
  slope(x, y, n);
  CHECK(y[0] == 1 && y[1] == 0 && y[2] != y[2] && y[3] == 0 && y[4] == 0 && y[5] != y[5], "%s tanh slope", isa);
}

}  // namespace
}  // namespace mha::cpu

int main() {
  using namespace mha::cpu;
  const int levels[] = {0, 1, 2};
  for (int level : levels) {
    if (level > static_cast<int>(machine_isa()) || level >= static_cast<int>(sizeof kLevels / sizeof *kLevels)) break;
    const Functions& f = kLevels[level];
    check_error(f.isa, "exp", f.exp_f32, exp_reference, -87, -0.0, 1.1);
    check_error(f.isa, "exp", f.exp_f64, exp_reference, -708, -0.0, 1.1);
    check_error(f.isa, "exp", f.exp_f32, exp_reference, -2, -1e-9, 1.1);
    check_error(f.isa, "exp", f.exp_f64, exp_reference, -2, -1e-9, 1.1);
    check_error(f.isa, "tanh", f.tanh_f32, tanh_reference, -10, 10, 2.6);
    check_error(f.isa, "tanh", f.tanh_f64, tanh_reference, -20, 20, 2.6);
    check_error(f.isa, "tanh slope", f.slope_f32, slope_reference, -40, 40, 4.5);
    check_error(f.isa, "tanh slope", f.slope_f64, slope_reference, -300, 300, 4.5);
    check_special(f.isa, f.exp_f32, f.tanh_f32, f.slope_f32);
    check_special(f.isa, f.exp_f64, f.tanh_f64, f.slope_f64);
  }
  return test::summary("exp");
}
