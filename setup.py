"""Builds the compiled part of mha_ext; everything else about the package is in pyproject.toml.

``mha_ext._C`` holds the operators' schemas and their CPU kernels. It speaks the libtorch stable ABI
(https://docs.pytorch.org/docs/stable/notes/libtorch_stable_abi.html), so that one build runs on every torch from 2.10
on, whichever torch happened to be installed at build time.
"""

import sys
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from torch.utils import cpp_extension

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


def files(*patterns: str) -> list[str]:
    """Files that match, relative to the repository root, as setuptools wants them."""
    return sorted(path for pattern in patterns for path in glob(pattern, root_dir=HERE, recursive=True))


def cpu_extension() -> Extension:
    # A plain Extension: CppExtension would link libtorch_python, which the stable ABI makes unnecessary.
    return Extension(
        "mha_ext._C",
        files("csrc/ops/*.cpp", "csrc/cpu/**/*.cpp"),
        depends=files("csrc/**/*.h", "csrc/**/*.inl"),
        library_dirs=cpp_extension.library_paths(),
        libraries=["torch_cpu"],
        # -isystem: torch's headers are not ours to keep free of warnings.
        extra_compile_args={"cxx": COMPILE_FLAGS + [f"-isystem{path}" for path in cpp_extension.include_paths()]},
        language="c++",
    )


if sys.platform == "win32":
    sys.exit("mha_ext builds on Linux and macOS with gcc or clang; MSVC has no vector extensions")

setup(ext_modules=[cpu_extension()], cmdclass={"build_ext": cpp_extension.BuildExtension})
