// Everything that the kernels use from outside, included before any target region opens.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../../core/half.h"
#include "../../core/masking.h"
#include "../../core/philox.h"
#include "../../core/problem.h"
#include "../../core/strides.h"
#include "../../core/sum_plan.h"
#include "../scratch.h"
#include "tables.h"
#include "target.h"
#if defined(__x86_64__)
// The headers of gcc 12 set off its own warning in every AVX-512 intrinsic (gcc bug 105593).
#if !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif
