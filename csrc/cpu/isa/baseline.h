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
#include <immintrin.h>
#endif
