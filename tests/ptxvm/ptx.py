"""Small PTX programs for the tests: load a text, run one block of a kernel, read the result."""

import ctypes

import numpy as np

from .build import build_interpreter
from .harness import CACHE, Interpreter, extent

HEADER = ".version 8.0\n.target sm_90\n.address_size 64\n"
REGISTERS = """.reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<32>; .reg .b64 %d<8>; .reg .b64 %in, %out;
mov.u32 %r0, %tid.x; ld.param.u64 %in, [in]; ld.param.u64 %out, [out];
mad.wide.u32 %in, %r0, 4, %in; mad.wide.u32 %out, %r0, 4, %out;
"""


class Ptx:
    """A module of PTX text in the interpreter, whose kernels take pointers only."""

    def __init__(self, text):
        """Load the text; kernels are read when they first run."""
        self.vm = Interpreter(build_interpreter(CACHE) / "libptxvm.so")
        self.number = self.vm.library.ptxvm_load(text.encode(), ctypes.c_uint64(len(text.encode())))
        assert self.number >= 0, self.vm.findings()

    def run(self, kernel, *arrays, threads=32, statistics=False):
        """Run one block with all checks; raise on findings."""
        pointers = np.array([extent(array)[0] for array in arrays], dtype=np.uint64)
        grid, block = (ctypes.c_uint32 * 3)(1, 1, 1), (ctypes.c_uint32 * 3)(threads, 1, 1)
        with self.vm.checked(statistics=statistics, **{f"array{i}": array for i, array in enumerate(arrays)}):
            parameters = ctypes.c_void_p(pointers.ctypes.data)
            self.vm.library.ptxvm_launch(self.number, kernel.encode(), grid, block, 0, parameters)


def body_kernel(body, shared=0):
    """PTX of kernel `k(in, out)`: %in and %out point to this thread's 4-byte words, %r0 is the thread."""
    variable = f".shared .align 16 .b8 buffer[{shared}];\n" if shared else ""
    return f"{HEADER}.visible .entry k(.param .u64 in, .param .u64 out)\n{{\n{variable}{REGISTERS}{body}\nret;\n}}\n"


def run_body(body, array, shared=0, result=np.uint32, threads=32):
    """Run a body on an array; return the word that each thread writes."""
    out = np.zeros(threads, dtype=result)
    Ptx(body_kernel(body, shared)).run("k", array, out, threads=threads)
    return out
