"""Build the interpreter: libptxvm.so and the stand-in libcudart.so.13, into a folder the caller names.

From the command line: `python tests/ptxvm/build.py FOLDER`. MAX_JOBS compilers at once, as in torch's builds.
"""

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
# No contraction: PTX's mul and add round separately. Integers wrap as in PTX. Built where it runs.
FLAGS = ["-std=c++17", "-O2", "-fvect-cost-model=dynamic", "-march=native", "-fPIC", "-Wall", "-Wextra"]
FLAGS += ["-ffp-contract=off", "-fwrapv", "-fno-strict-aliasing", "-fno-semantic-interposition", "-fno-plt"]


def cuda_home() -> Path | None:
    """The CUDA toolkit that nvcc belongs to, or None without nvcc."""
    for candidate in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")):
        if candidate and (Path(candidate) / "bin" / "nvcc").exists():
            return Path(candidate)
    nvcc = shutil.which("nvcc")
    if not nvcc:
        return None
    for home in (Path(nvcc).resolve().parent.parent, Path("/usr/local/cuda")):
        if (home / "include" / "cuda_runtime_api.h").exists():
            return home
    return None


@contextlib.contextmanager
def locked(folder: Path):
    """Build in `folder` alone: the workers of pytest-xdist ask for the same things at once."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run(command, **options):
    """Run a command; its whole output is the message if it fails."""
    command = [str(part) for part in command]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def jobs() -> int:
    """How many compilers may run at once."""
    return int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)


def processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith("flags")), "")


def digest(files, extra="") -> str:
    """Name of a cached build: changes when a file or the flags do."""
    state = hashlib.sha256(extra.encode())
    for file in sorted(files):
        state.update(Path(file).read_bytes())
    return state.hexdigest()[:16]


def _compile(source: Path, folder: Path, home: Path) -> Path:
    result = folder / f"{source.stem}.{digest([source, *HERE.glob('*.h')], processor() + ' '.join(FLAGS))}.o"
    if not result.exists():
        partial = result.with_suffix(".partial")
        run(["g++", *FLAGS, f"-I{home / 'include'}", "-c", source, "-o", partial])
        partial.replace(result)
    return result


def build_interpreter(folder: Path) -> Path:
    """Build both libraries, or take what an earlier call left in `folder`. Returns the folder that holds them."""
    home = cuda_home()
    if home is None:
        raise RuntimeError("nvcc is not installed")
    sources = sorted(HERE.glob("*.cpp"))
    libraries = folder / digest([*sources, *HERE.glob("*.h")], processor() + " ".join(FLAGS))
    with locked(folder):
        if libraries.exists():
            return libraries
        with ThreadPoolExecutor(jobs()) as pool:
            compiled = pool.map(lambda source: _compile(source, folder, home), sources)
            objects = {source.stem: path for source, path in zip(sources, compiled, strict=True)}
        cudart = objects.pop("cudart")
        partial = folder / f"{libraries.name}.partial"
        partial.mkdir(exist_ok=True)
        run(["g++", "-shared", *objects.values(), "-o", partial / "libptxvm.so", "-Wl,-soname,libptxvm.so"])
        runtime = ["g++", "-shared", cudart, "-o", partial / "libcudart.so.13", "-Wl,-soname,libcudart.so.13"]
        run([*runtime, f"-L{partial}", "-lptxvm", "-Wl,-rpath,$ORIGIN"])
        partial.rename(libraries)
    return libraries


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="takes the build; an earlier one is taken from it")
    print(build_interpreter(parser.parse_args().folder))
