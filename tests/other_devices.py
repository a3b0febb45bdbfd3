"""The same tests on other kernels: every operator of mha_ext that a test calls goes to its CUDA implementation.

``MHA_EXT_TEST_ON=cuda pytest -m core`` runs them on the GPU, ``ptx80`` and ``ptx90`` on the PTX interpreter (ptxvm),
which needs nvcc and no GPU and checks every access to memory. The name takes the place of the ISA levels.

That takes long on the interpreter. ``MHA_EXT_TEST_ON=ptx80,ptx90 pytest -m interpreted`` runs some cases of each test.
"""

import collections
import os
import zlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mha_ext._load import why_no_gpu

KNOWN = ("cuda", "ptx80", "ptx90")
GIVEN = os.environ.get("MHA_EXT_TEST_ON", "")


def split(given):
    return tuple(name for name in given.split(",") if name)


NAMES = split(GIVEN)


def check_names(given=GIVEN):
    """Raises pytest.UsageError for a MHA_EXT_TEST_ON that tests cannot run on."""
    names = split(given)
    if not set(names) <= set(KNOWN):
        raise pytest.UsageError(
            f"MHA_EXT_TEST_ON must be some of {', '.join(KNOWN)} with commas between, got {given!r}"
        )
    if "cuda" in names and (reason := why_no_gpu()):
        raise pytest.UsageError(f"MHA_EXT_TEST_ON={given} needs a GPU: {reason}")


def on(name):
    """A context in which the operators run on that device."""
    if name == "cuda":
        return OnGpu()
    from interpreted import OnInterpreter, why_not

    if reason := why_not():
        pytest.skip(f"no interpreter of PTX: {reason}")
    return OnInterpreter(int(name.removeprefix("ptx")))


CASES = 2  # of each test function, per architecture: minutes instead of an hour
REPEATING = ("test_gradients.py", "test_modules.py")  # differences and training: what others call, thousands of times


def some_of_each_test(items):
    """Of those that run on the interpreter, the cases of each test function whose names have the smallest checksums.

    That choice is the same everywhere, has nothing to do with what the cases are (every n-th one might always have the
    same dtype), and is another one for each architecture, whose name is part of theirs.
    """
    by_test = collections.defaultdict(list)
    for item in items:
        device = item.callspec.params.get("isa", "") if hasattr(item, "callspec") else ""
        if device.startswith("ptx") and item.path.name not in REPEATING:
            by_test[item.function, device].append(item)
    for cases in by_test.values():
        yield from sorted(cases, key=lambda item: zlib.crc32(item.name.encode()))[:CASES]


def moved(x, device):
    """The tensor with its strides, and with what lies between its elements."""
    if not isinstance(x, torch.Tensor):
        return x
    storage = x.untyped_storage().to(device=device)
    return torch.empty(0, dtype=x.dtype, device=device).set_(storage, x.storage_offset(), x.size(), x.stride())


class OnGpu(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "mha_ext" or any(isinstance(x, torch.Tensor) and not x.is_cpu for x in args):
            return func(*args, **(kwargs or {}))
        inputs = [moved(x, "cuda") for x in args]
        results = func(*inputs, **(kwargs or {}))
        if func._opname.endswith("_out"):
            args[-1].copy_(inputs[-1])
        return tuple(moved(x, "cpu") for x in results) if isinstance(results, tuple) else moved(results, "cpu")
