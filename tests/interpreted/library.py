"""Builds the operators with their CUDA kernels for the interpreter, once for each state of the sources."""

from __future__ import annotations

import ctypes
import functools
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from filelock import FileLock
from ptxvm.build import build_interpreter, cuda_home, digest, run
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("csrc/core", "csrc/cuda", "csrc/ops", "tests/ptxvm", "tests/interpreted")
SUFFIXES = (".h", ".cpp", ".inl", ".cu", ".cuh", ".py")
ARCHITECTURES = (80, 90)


def why_not() -> str | None:
    """What keeps the kernels from being interpreted here, if anything does."""
    if torch.version.cuda is not None:
        return "the runtime of torch's CUDA build would answer in place of the interpreter's"
    return None if cuda_home() else "nvcc is not installed"


def _state() -> str:
    """A name for the sources as they are."""
    paths = [path for folder in SOURCES for path in (ROOT / folder).rglob("*")]
    return digest([path for path in paths if path.suffix in SUFFIXES], torch.__version__)


def _kernels(source: Path, folder: Path) -> Path:
    """An object with the host code of the launchers and the kernels as PTX."""
    made = folder / f"{source.stem}.o"
    codes = [f"-gencode=arch=compute_{number},code=compute_{number}" for number in ARCHITECTURES]
    options = ["-std=c++17", "-O3", "--no-compress", "-lineinfo", "-Xcompiler=-fPIC,-fvisibility=hidden"]
    run(["nvcc", *options, *codes, "-c", source, "-o", made])
    return made


def _operators(folder: Path) -> Path:
    made = folder / "operators.o"
    headers = [f"-isystem{path}" for path in (*cpp_extension.include_paths(), cuda_home() / "include")]
    source = ROOT / "tests" / "interpreted" / "operators.cpp"
    run(["g++", "-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", *headers, "-c", source, "-o", made])
    return made


def _build(into: Path, runtime: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(2) as pool:
        folder = Path(temporary)
        launchers = sorted((ROOT / "csrc" / "cuda" / "launch").glob("*.cu"))
        jobs = [pool.submit(_kernels, source, folder) for source in launchers]
        jobs.append(pool.submit(_operators, folder))
        objects = [job.result() for job in jobs]
        linked = folder / "operators.so"
        torch_libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
        ours = [f"-L{runtime}", "-lptxvm", "-l:libcudart.so.13", f"-Wl,-rpath,{runtime}"]
        run(["g++", "-shared", *objects, *ours, *torch_libraries, "-ltorch_cpu", "-o", linked])
        shutil.move(linked, into / "operators.so")


@functools.cache
def load() -> ctypes.CDLL:
    """Register ``torch.ops.mha_ext_ptxvm``; returns the interpreter (ptxvm/api.h). The first process to come builds,
    the others wait."""
    into = ROOT / "build" / f"interpreted-{_state()}"
    into.mkdir(parents=True, exist_ok=True)
    with FileLock(into / "lock"):
        runtime = build_interpreter(ROOT / "build" / "ptxvm")
        if not (into / "operators.so").exists():
            _build(into, runtime)
    torch.ops.load_library(str(into / "operators.so"))
    interpreter = ctypes.CDLL(str(runtime / "libptxvm.so"))
    interpreter.ptxvm_findings.restype = ctypes.c_char_p
    interpreter.ptxvm_statistics.restype = ctypes.c_char_p
    return interpreter
