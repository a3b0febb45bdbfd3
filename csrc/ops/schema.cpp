#include "operators/schemas.h"

#include "stable_abi.h"

STABLE_TORCH_LIBRARY(mha_ext, m) { mha::ops::define_all(m); }
