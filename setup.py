"""Builds the compiled part of mha_ext; everything else about the package is in pyproject.toml.

``mha_ext._C`` holds the operators' schemas and their CPU kernels, ``mha_ext._C_cuda`` their CUDA kernels. Both speak
the libtorch stable ABI (https://docs.pytorch.org/docs/stable/notes/libtorch_stable_abi.html), so that one build runs on
every torch from 2.10 on, whichever torch happened to be installed at build time.

Environment: ``MHA_EXT_CUDA`` = ``auto`` (the default: for the GPUs of this machine, if there are any), ``0`` (without
CUDA) or ``1`` (with CUDA or not at all, for the architectures below or those of ``TORCH_CUDA_ARCH_LIST``, which the
other choices do not look at).
"""

import os
import re
import subprocess
import sys
from glob import glob
from pathlib import Path

import torch
from setuptools import Extension, setup

if not os.environ.get("CUDA_HOME") and Path("/usr/local/cuda/bin/nvcc").exists():
    os.environ["CUDA_HOME"] = "/usr/local/cuda"  # torch guesses from where nvcc is found, which may be a link elsewhere

from torch.utils import cpp_extension  # reads CUDA_HOME at import

HERE = Path(__file__).resolve().parent

# -O2: the kernels are written in vectors and unrolled where it matters. -O3 measured the same and takes twice as long.
# -g0: Python's own flags hold -g, which makes the library 15 times larger.
# -ffp-contract=fast: a * b + c becomes one FMA with clang too (gcc's default), which the kernels' speed rests on.
# -ffile-prefix-map: no path of the building machine in the library.
COMPILE_FLAGS = [
    "-std=c++17",
    "-O2",
    "-g0",
    "-fvisibility=hidden",
    "-ffp-contract=fast",
    "-Wall",
    "-Wextra",
    f"-ffile-prefix-map={HERE}=.",
]
# Ampere, Hopper and the two Blackwells as machine code, and PTX for everything else from Ampere on.
CUDA_ARCHS = ["8.0", "9.0", "10.0", "12.0+PTX"]
CUDA_NAME = "mha_ext._C_cuda"
OLDEST_CAPABILITY = (8, 0)  # the first with mma of bfloat16 and cp.async


def files(*patterns: str) -> list[str]:
    """Files that match, relative to the repository root, as setuptools wants them."""
    return sorted(path for pattern in patterns for path in glob(pattern, root_dir=HERE, recursive=True))


def torch_headers() -> list[str]:
    # -isystem: torch's headers are not ours to keep free of warnings.
    return [f"-isystem{path}" for path in cpp_extension.include_paths()]


def cpu_extension() -> Extension:
    # A plain Extension: CppExtension would link libtorch_python, which the stable ABI makes unnecessary.
    return Extension(
        "mha_ext._C",
        files("csrc/ops/*.cpp", "csrc/ops/cpu/*.cpp", "csrc/cpu/**/*.cpp"),
        depends=files("csrc/**/*.h", "csrc/**/*.inl"),
        library_dirs=cpp_extension.library_paths(),
        libraries=["torch_cpu"],
        extra_compile_args={"cxx": COMPILE_FLAGS + torch_headers()},
        language="c++",
    )


def cuda_extension(archs: list[str]) -> Extension:
    cuda_headers = f"-isystem{cpp_extension.CUDA_HOME}/include"
    return Extension(
        CUDA_NAME,
        files("csrc/ops/cuda/*.cpp", "csrc/cuda/launch/*.cu"),
        depends=files("csrc/**/*.h", "csrc/**/*.inl", "csrc/**/*.cuh"),
        library_dirs=cpp_extension.library_paths("cuda"),
        libraries=["torch_cpu", "torch_cuda", "cudart"],
        define_macros=[("MHA_CUDA_ARCHS", f'"{" ".join(archs)}"')],
        extra_compile_args={
            "cxx": [*COMPILE_FLAGS, *torch_headers(), cuda_headers],
            "nvcc": ["-std=c++17", "-O3", "-Xcompiler=-fvisibility=hidden", gencode(archs)],
        },
        language="c++",
    )


def number_of(arch: str) -> int | None:
    """
    >>> number_of("9.0a"), number_of("12.0+PTX"), number_of("Hopper")
    (90, 120, None)
    """
    found = re.fullmatch(r"(\d+)\.(\d)[af]?(\+PTX)?", arch)
    return int(found[1] + found[2]) if found else None


def gencode(archs: list[str]) -> str:
    """One PTX, for the oldest of the architectures, and the machine code of each made from it: no kernel uses what a
    later one adds, nor what an ``a`` or ``f`` behind the number would allow, and making PTX takes half the time.

    >>> gencode(["9.0a", "12.0+PTX"])
    '-gencode=arch=compute_90,code=[sm_90,sm_120,compute_90]'
    """
    numbers = sorted({number_of(arch) for arch in archs})
    codes = [f"sm_{number}" for number in numbers]
    if any(arch.endswith("+PTX") for arch in archs):
        codes.append(f"compute_{numbers[0]}")
    return f"-gencode=arch=compute_{numbers[0]},code=[{','.join(codes)}]"


def visible_archs() -> list[str]:
    """Architectures of the GPUs of this machine, those that the kernels run on."""
    if not torch.cuda.is_available():
        return []
    found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return [f"{major}.{minor}" for major, minor in sorted(found) if (major, minor) >= OLDEST_CAPABILITY]


def nvcc_says(option: str) -> str:
    return subprocess.run([Path(cpp_extension.CUDA_HOME, "bin", "nvcc"), option], capture_output=True, text=True).stdout


def why_no_cuda() -> str | None:
    """What keeps CUDA code from being built here, if anything does."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    if cpp_extension.CUDA_HOME is None:
        return "there is no nvcc: set CUDA_HOME"
    if not Path(cpp_extension.CUDA_HOME, "bin", "nvcc").exists():
        return f"there is no bin/nvcc in CUDA_HOME, {cpp_extension.CUDA_HOME}"
    found = re.search(r"release (\d+)\.\d+", nvcc_says("--version"))
    major = torch.version.cuda.split(".")[0]
    if found is None or found[1] != major:
        return f"nvcc is of CUDA {found[1] if found else '?'}, torch of CUDA {major}"
    return None


def why_not_for(archs: list[str]) -> str | None:
    """What keeps it from being built for these architectures."""
    if not all(number_of(arch) for arch in archs):
        return f"TORCH_CUDA_ARCH_LIST must list architectures like 9.0 or 12.0+PTX, got {' '.join(archs)}"
    oldest = number_of("{}.{}".format(*OLDEST_CAPABILITY))
    if old := [arch for arch in archs if number_of(arch) < oldest]:
        return f"the kernels need compute capability 8.0 or later, not {' '.join(old)}"
    known = nvcc_says("--list-gpu-code").split()
    if unknown := [code for code in (f"sm_{number_of(arch)}" for arch in archs) if code not in known]:
        return f"this nvcc does not know {' '.join(unknown)}; TORCH_CUDA_ARCH_LIST names other architectures"
    return None


def cuda_archs() -> list[str]:
    """The architectures to build for; none: no CUDA."""
    wanted = os.environ.get("MHA_EXT_CUDA") or "auto"
    if wanted not in ("auto", "0", "1"):
        sys.exit(f"MHA_EXT_CUDA must be auto, 0 or 1, got {wanted!r}")
    if wanted == "0":
        return []
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    archs = visible_archs() if wanted == "auto" else listed or CUDA_ARCHS
    reason = why_no_cuda()
    if reason is None:
        reason = why_not_for(archs) if archs else "this machine has no GPU of compute capability 8.0 or later"
    if reason is None:
        return archs
    if wanted == "1":
        sys.exit(f"MHA_EXT_CUDA=1, but {reason}")
    print(f"mha_ext: building without CUDA, as {reason}. MHA_EXT_CUDA=1 builds with it or fails.")
    return []


class BuildExt(cpp_extension.BuildExtension):
    """Leaves no library of CUDA kernels from an earlier build beside a new one without: the two would not fit."""

    def run(self) -> None:
        if not any(extension.name == CUDA_NAME for extension in self.extensions):
            Path(self.get_ext_fullpath(CUDA_NAME)).unlink(missing_ok=True)
        super().run()


if sys.platform == "win32":
    sys.exit("mha_ext builds on Linux and macOS with gcc or clang; MSVC has no vector extensions")

archs = cuda_archs()
setup(
    ext_modules=[cpu_extension(), *([cuda_extension(archs)] if archs else [])],
    cmdclass={"build_ext": BuildExt},
)
