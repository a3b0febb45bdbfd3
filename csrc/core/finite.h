// Options arrive as double. Here they become the type T that a kernel calculates in, float or double, so that a finite
// number stays finite and a positive one positive.
#pragma once
#include "inline.h"

namespace mha {

template <class T>
struct FiniteRange {
  static constexpr double largest = sizeof(T) == 8 ? __DBL_MAX__ : static_cast<double>(__FLT_MAX__);
  static constexpr double smallest_normal = sizeof(T) == 8 ? __DBL_MIN__ : static_cast<double>(__FLT_MIN__);
};

// -inf stays what it is.
template <class T>
MHA_INLINE T to_finite(double x) {
  constexpr double largest = FiniteRange<T>::largest;
  if (x == -__builtin_inf()) return -static_cast<T>(__builtin_inf());
  return static_cast<T>(x < -largest ? -largest : x > largest ? largest : x);
}

// 0 says "none" and stays 0; what is positive must not become 0 on the way.
template <class T>
MHA_INLINE T softcap_in(double softcap) {
  constexpr double smallest = FiniteRange<T>::smallest_normal;
  return softcap == 0 ? T{0} : to_finite<T>(softcap < smallest ? smallest : softcap);
}

}  // namespace mha
