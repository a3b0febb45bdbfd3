"""Builds the operators with their CUDA kernels for the interpreter, once for each state of the sources."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from ptxvm.build import build_interpreter, cuda_home, digest, locked, run
from ptxvm.harness import CACHE, build_kernels
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = (80, 90)


def why_not() -> str | None:
    """What keeps the kernels from being interpreted here, if anything does."""
    if torch.version.cuda is not None:
        return "the runtime of torch's CUDA build would answer in place of the interpreter's"
    return None if cuda_home() else "nvcc is not installed"


def _operators(kernels: Path) -> Path:
    """The operators, linked with their kernels."""
    source = ROOT / "tests" / "interpreted" / "operators.cpp"
    headers = [path for part in ("core", "cuda", "ops") for path in (ROOT / "csrc" / part).rglob("*.[hi]*")]
    headers.append(ROOT / "tests" / "ptxvm" / "api.h")
    result = CACHE / f"operators.{digest([source, *headers], torch.__version__ + str(kernels))}.so"
    runtime = build_interpreter(CACHE)
    with locked(CACHE):
        if not result.exists():
            partial = result.with_suffix(".partial")
            includes = [f"-isystem{path}" for path in (*cpp_extension.include_paths(), cuda_home() / "include")]
            libraries = [kernels, *(f"-L{path}" for path in cpp_extension.library_paths()), "-ltorch_cpu"]
            libraries += [f"-L{runtime}", "-lptxvm", f"-Wl,-rpath,{runtime}"]
            run(["g++", "-std=c++17", "-O1", "-fPIC", "-shared", *includes, source, *libraries, "-o", partial])
            partial.replace(result)
    return result


@functools.cache
def load() -> ctypes.CDLL:
    """Register ``torch.ops.mha_ext_ptxvm``; returns the interpreter (ptxvm/api.h). The first process to come builds,
    the others wait."""
    launchers = sorted((ROOT / "csrc" / "cuda" / "launch").glob("*.cu"))
    torch.ops.load_library(str(_operators(build_kernels(launchers, CACHE, ARCHITECTURES))))
    interpreter = ctypes.CDLL(str(build_interpreter(CACHE) / "libptxvm.so"))
    interpreter.ptxvm_findings.restype = ctypes.c_char_p
    interpreter.ptxvm_not_launched.restype = ctypes.c_char_p
    interpreter.ptxvm_statistics.restype = ctypes.c_char_p
    return interpreter
