"""Run CUDA kernels in the interpreter from Python, launch code included.

folder = Path(".cache/ptxvm")
library = build_kernels(["csrc/cuda/launch/dropout.cu", "shim.cu"], folder)  # README.md shows the shim
vm = Interpreter(library)
with vm.checked(const_weights=weights, const_seed=seed, out=out):  # what kernels may touch, by name; raises findings
    vm.library.run_dropout(ctypes.c_void_p(weights.data_ptr()), ...)
"""

import contextlib
import ctypes
import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .build import build_interpreter, cuda_home, digest, jobs, locked, run

CACHE = Path(__file__).resolve().parents[2] / "build" / "ptxvm"  # of the tests; anything in it can be made again


class FoundFaults(AssertionError):
    """What the checker found, one finding a line."""


def nvcc_command(architecture=80, include=(), defines=()):
    """Command that compiles to PTX alone: no ptxas, and uncompressed so that the stand-in runtime can read it.

    `architecture` is one number or several: with (80, 90), the device that Interpreter is told of decides what runs.
    """
    command = [cuda_home() / "bin" / "nvcc", "-std=c++17", "-O3", "--no-compress", "-lineinfo", "-Xcompiler", "-fPIC"]
    for number in [architecture] if isinstance(architecture, int) else architecture:
        command += ["-gencode", f"arch=compute_{number},code=compute_{number}"]
    command += [f"-I{path}" for path in include] + [f"-D{define}" for define in defines]
    return [str(part) for part in command]


def build_kernels(sources, folder, architecture=80, include=(), defines=(), depends=()):
    """Build the .cu files into one shared object against the stand-in runtime. Returns its path.

    Cached in `folder` by the content of the sources, the files they include, and `depends`.
    """
    sources, folder = [Path(source).resolve() for source in sources], Path(folder)
    libraries = build_interpreter(folder)
    command = nvcc_command(architecture, include, defines)
    with locked(folder), ThreadPoolExecutor(jobs()) as pool:
        objects = list(pool.map(lambda source: _compile(source, folder, command, depends), sources))
        result = folder / f"kernels.{digest(objects, str(libraries))}.so"
        if not result.exists():
            partial = folder / f"{result.stem}.partial"
            link = ["g++", "-shared", *objects, "-o", partial, f"-L{libraries}", "-l:libcudart.so.13", "-lptxvm"]
            run([*link, f"-Wl,-rpath,{libraries.resolve()}", "-Wl,-z,defs"])
            partial.replace(result)
        return result


def _compile(source, folder, command, depends):
    # The list of included files is that of the last compilation. What the system holds does not change under us.
    key = hashlib.sha256(" ".join([*command, str(source)]).encode()).hexdigest()[:16]
    listing = folder / f"{source.stem}.{key}.d"

    def object_file():
        listed = listing.read_text().replace("\\\n", " ").split()[2:]
        included = [Path(name) for name in listed if not name.startswith(("/usr/", str(cuda_home())))]
        return folder / f"{source.stem}.{digest([source, *included, *depends], key)}.o"

    with contextlib.suppress(OSError):
        if object_file().exists():
            return object_file()
    partial = folder / f"{source.stem}.{key}.partial.o"
    run([*command, "-c", source, "-o", partial, "-MD", "-MF", partial.with_suffix(".d")])
    partial.with_suffix(".d").replace(listing)
    partial.replace(object_file())
    return object_file()


class Interpreter:
    """One library of kernels and the interpreter it runs in.

    The interpreter's state (checks, registered memory, findings) belongs to the process: libraries that were linked
    against the same build of it share that state.
    """

    def __init__(self, library, architecture=None, multiprocessors=132):
        """Load the library; `architecture` (80, 90) is what the launch code is told it runs on."""
        library = Path(library)
        self.library = ctypes.CDLL(str(library))
        self._vm = self.library  # the interpreter's functions are found through what depends on it
        for name in ("findings", "statistics", "error", "unknown"):
            getattr(self._vm, f"ptxvm_{name}").restype = ctypes.c_char_p
        self._vm.ptxvm_executed.restype = ctypes.c_uint64
        self._vm.ptxvm_register.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p]
        if architecture is not None:
            self._vm.ptxvm_device(architecture // 10, architecture % 10, multiprocessors)

    def options(self, check=True, statistics=False, limit=2**28):
        """Turn the checks and the access statistics on or off; a block is stopped after `limit` instructions."""
        self._vm.ptxvm_options(int(check), int(statistics))
        self._vm.ptxvm_limit(ctypes.c_uint64(limit))

    def most_blocks(self, blocks):
        """Cut the grids of kernels that read gridDim.x to so many blocks in x."""
        self._vm.ptxvm_most_blocks(ctypes.c_uint32(blocks))

    def register(self, tensor, name="", writable=True):
        """Let kernels touch the elements of a torch tensor or numpy array, whatever its strides."""
        begin, size = extent(tensor)
        if size:
            self._vm.ptxvm_register(begin, size, int(writable), name.encode())

    def reset(self):
        """Forget findings, statistics and registered memory."""
        self._vm.ptxvm_reset()

    def findings(self):
        """List the findings since the last reset; the same at one place is one of them."""
        return self._vm.ptxvm_findings().decode().splitlines()

    def statistics(self):
        """List the memory accesses per kernel, source line and opcode, as dictionaries (see statistics.h)."""
        return json.loads(self._vm.ptxvm_statistics().decode())

    def unknown_instructions(self):
        """List what the loaded kernels contain that the interpreter cannot execute, whether it is reached or not."""
        return self._vm.ptxvm_unknown().decode().splitlines()

    def executed(self):
        """Count the instructions executed so far, one for all lanes of a warp."""
        return self._vm.ptxvm_executed()

    @contextlib.contextmanager
    def checked(self, statistics=False, limit=2**28, any_memory=False, **tensors):
        """Run kernels with all checks; raise FoundFaults with what was found. A leading `const_` means read-only.

        `any_memory`: global memory that is not registered may be touched, unchecked. For operators that allocate.
        """
        self.reset()
        self.options(check=True, statistics=statistics, limit=limit)
        self._vm.ptxvm_any_memory(int(any_memory))
        for name, tensor in tensors.items():
            if tensor is not None:
                self.register(tensor, name.removeprefix("const_"), writable=not name.startswith("const_"))
        yield self
        if found := self.findings():
            raise FoundFaults("\n" + "\n".join(found))


def extent(tensor):
    """Address of the first element in memory, and bytes to the end of the last."""
    if hasattr(tensor, "data_ptr"):  # torch
        strides, size, pointer = tensor.stride(), tensor.element_size(), tensor.data_ptr()
        steps = [stride * size for stride in strides]
    else:
        steps, size, pointer = tensor.strides, tensor.itemsize, tensor.ctypes.data
    if 0 in tensor.shape:
        return pointer, 0
    spans = [step * (length - 1) for step, length in zip(steps, tensor.shape, strict=True)]
    return pointer + sum(span for span in spans if span < 0), sum(abs(span) for span in spans) + size
