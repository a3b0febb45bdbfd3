// The only includer of torch's C++ headers, and of these only the stable ones. TORCH_TARGET_VERSION is the oldest torch
// that the build runs on; with it set, torch rejects any unstable header (ATen, c10) in the same file.
#pragma once
#ifdef TORCH_FEATURE_VERSION
#error "include stable_abi.h before any torch header"
#endif
#define TORCH_TARGET_VERSION 0x020A000000000000ULL  // 2.10

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/version.h>
