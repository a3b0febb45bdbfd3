// The vector layer, common part: what does not depend on the instruction set. Built on the compilers' vector
// extensions, so that +, -, *, <, ?: act lane by lane and the same source compiles to every level. A level's own header
// (vec_generic.h, vec_avx2.h, vec_avx512.h) comes first: it sets kVectorBytes and supplies the few operations that the
// extensions cannot express.
//
// Included inside a target region and an unnamed namespace: includes nothing (isa/baseline.h has done so), defines
// nothing with linkage.

template <class T>
struct VecTypes;
template <>
struct VecTypes<float> {
  typedef float type __attribute__((vector_size(kVectorBytes)));
  typedef float unaligned __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
  typedef int32_t mask __attribute__((vector_size(kVectorBytes)));
};
template <>
struct VecTypes<double> {
  typedef double type __attribute__((vector_size(kVectorBytes)));
  typedef double unaligned __attribute__((vector_size(kVectorBytes), aligned(8), may_alias));
  typedef int64_t mask __attribute__((vector_size(kVectorBytes)));
};

// Vec<T>: one register of T, T = float or double. VecMask<T>: lane-wise -1 or 0, as comparisons give.
template <class T>
using Vec = typename VecTypes<T>::type;
template <class T>
using VecMask = typename VecTypes<T>::mask;
template <class T>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

template <class T>
MHA_INLINE Vec<T> splat(T x) {
  return x - Vec<T>{};
}

// load<T> reads kLanes elements of the storage type T (double, float, bfloat16, float16) and widens them to the
// accumulation type; store<T> narrows with round-to-nearest-even.
template <class T>
MHA_INLINE Vec<accumulate_t<T>> load(const T* p) {
  if constexpr (std::is_same_v<T, bfloat16>) return widen_bfloat16(p);
  else if constexpr (std::is_same_v<T, float16>) return widen_float16(p);
  else return *reinterpret_cast<const typename VecTypes<T>::unaligned*>(p);
}
template <class T>
MHA_INLINE void store(T* p, Vec<accumulate_t<T>> v) {
  if constexpr (std::is_same_v<T, bfloat16>) narrow_bfloat16(p, v);
  else if constexpr (std::is_same_v<T, float16>) narrow_float16(p, v);
  else *reinterpret_cast<typename VecTypes<T>::unaligned*>(p) = v;
}

// store<T> that does not bring the line into the cache; p is aligned to the bytes written. stream_fence() follows the
// last one.
template <class T>
MHA_INLINE void store_streaming(T* p, Vec<accumulate_t<T>> v) {
  if constexpr (std::is_same_v<T, accumulate_t<T>>) stream(p, v);
  else {
    T lanes[kLanes<accumulate_t<T>>];
    store<T>(lanes, v);
    stream_half(p, lanes);
  }
}

// The first n < kLanes elements; the other lanes read as `fill`, and are not written.
template <class T>
MHA_INLINE Vec<accumulate_t<T>> load_first(const T* p, int n, accumulate_t<T> fill = 0) {
  T lanes[kLanes<accumulate_t<T>>];
  for (int i = 0; i < kLanes<accumulate_t<T>>; ++i) lanes[i] = i < n ? p[i] : narrow<T>(fill);
  return load<T>(lanes);
}
template <class T>
MHA_INLINE void store_first(T* p, Vec<accumulate_t<T>> v, int n) {
  T lanes[kLanes<accumulate_t<T>>];
  store<T>(lanes, v);
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
}

template <class T>
MHA_INLINE Vec<T> select(VecMask<T> condition, Vec<T> yes, Vec<T> no) {
  return condition ? yes : no;
}

// One register of small unsigned integers (uint8_t, uint16_t) as lanes as wide as T's.
template <class T, class Small>
MHA_INLINE VecMask<T> widen_integers(const Small* p) {
  if constexpr (sizeof(T) == 4) return int32_from(p);
  else return int64_from(p);
}

// The lanes of a register, brought together in a tree of halves: the order is fixed, and the error of a sum small.
template <class T, int N>
struct VecOf {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
};
template <class T, int N, class Both>
MHA_INLINE T across_lanes(typename VecOf<T, N>::type v, const Both& both) {
  if constexpr (N == 2) return both(v[0], v[1]);
  else {
    typename VecOf<T, N / 2>::type half[2];
    std::memcpy(half, &v, sizeof v);
    return across_lanes<T, N / 2>(both(half[0], half[1]), both);
  }
}
template <class T>
MHA_INLINE T lane_sum(Vec<T> v) {
  return across_lanes<T, kLanes<T>>(v, [](auto a, auto b) { return a + b; });
}
template <class T>
MHA_INLINE T lane_max(Vec<T> v) {
  return across_lanes<T, kLanes<T>>(v, [](auto a, auto b) { return a > b ? a : b; });
}
