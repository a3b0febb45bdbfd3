// The Python module mha_ext._C_cuda. Loading it registers the operators' CUDA implementations.
#include <pybind11/pybind11.h>

#include "../operators/schemas.h"

PYBIND11_MODULE(_C_cuda, m) {
  m.doc() = "CUDA kernels of mha_ext's operators.";
  m.attr("archs") = MHA_CUDA_ARCHS;
  m.attr("schemas") = mha::ops::schemas_as_text();
}
