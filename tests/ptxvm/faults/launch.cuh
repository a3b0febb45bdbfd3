// All kernels here have one signature and run as one block: a C function of the kernel's name launches it.
#pragma once
#include <cuda_runtime.h>

#define LAUNCHER(kernel, threads, shared_bytes)                     \
  extern "C" int run_##kernel(float* out, const float* in, int n) { \
    kernel<<<1, threads, shared_bytes>>>(out, in, n);               \
    return int(cudaGetLastError());                                 \
  }
