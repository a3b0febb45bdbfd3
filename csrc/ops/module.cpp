// The Python module mha_ext._C: what was built, which instruction-set level runs, and what the machine can do at most.
// Operators reach Python through torch's dispatcher, so no tensor passes here and libtorch_python is not needed.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "../cpu/dispatch/dispatch.h"
#include "../cpu/peak.h"
#include "operators/schemas.h"
#include "torch_version.h"

namespace {

#define MHA_TEXT_(x) #x
#define MHA_TEXT(x) MHA_TEXT_(x)

pybind11::dict build_info() {
  const uint64_t target = mha::ops::torch_target_version();
  pybind11::dict info;
#if defined(__clang__)
  info["compiler"] = "clang " __clang_version__;
#else
  info["compiler"] = "gcc " __VERSION__;
#endif
  info["cpp_standard"] = static_cast<long>(__cplusplus);
  info["pybind11"] =
      MHA_TEXT(PYBIND11_VERSION_MAJOR) "." MHA_TEXT(PYBIND11_VERSION_MINOR) "." MHA_TEXT(PYBIND11_VERSION_PATCH);
  info["torch_headers"] = mha::ops::torch_headers_version();
  info["torch_target"] = std::to_string(target >> 56) + "." + std::to_string(target >> 48 & 0xFF);
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled part of mha_ext: build information, the instruction-set level, and the machine's measured peaks.";
  m.attr("schemas") = mha::ops::schemas_as_text();
  m.def("build_info", &build_info, "What this library was built with, as a dict of strings and numbers.");
  m.def("supported_isas", &mha::cpu::supported_isas, "Levels this machine can run, lowest first.");
  m.def("isa", [] { return std::string(mha::cpu::kernels().isa); }, "The level in use.");
  m.def("set_isa", &mha::cpu::set_isa, "Use another level from now on, in the whole process.", pybind11::arg("name"));
  m.def("peak_kinds", &mha::cpu::peak_kinds, "Kinds of peak of the level in use; what each means: csrc/cpu/peak.h.");
  m.def("measure_peak", &mha::cpu::measure_peak, "Measure a peak: GF/s, or GB/s for the bandwidths.",
        pybind11::arg("kind"), pybind11::arg("threads"), pybind11::call_guard<pybind11::gil_scoped_release>());
}
