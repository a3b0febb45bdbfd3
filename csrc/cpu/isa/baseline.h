// Everything that the kernels use from outside, included before any target region opens.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../../core/attention.h"
#include "../../core/backward_plan.h"
#include "../../core/finite.h"
#include "../../core/fused_plan.h"
#include "../../core/half.h"
#include "../../core/integers.h"
#include "../../core/masking.h"
#include "../../core/philox.h"
#include "../../core/problem.h"
#include "../../core/strides.h"
#include "../../core/sum_plan.h"
#include "../scratch.h"
#include "tables.h"
#include "target.h"
#if defined(__x86_64__)
// gcc 12 warns about its own _mm512_undefined_ps(), which is uninitialized by intention (gcc bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif
