"""Fixtures that every test shares: each ISA level in turn, and a torch that is left as it was found."""

import os

# Before torch is imported: a compiled kernel from an earlier build must not answer for this one.
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

import other_devices
import pytest
import torch

import mha_ext

LEVELS = list(dict.fromkeys(["generic", "avx2", "avx512", "avx512_bf16", "amx_bf16", *mha_ext.supported_isas()]))


CORE = (
    "scores",
    "masked_softmax",
    "weighted_sum",
    "attention",
    "fused",
    "fused_hard",
    "dropout",
    "gradients",
    "hard_inputs",
    "large_logits",
    "errors",
    "every_kernel",
    "modules",
)


def pytest_configure(config):
    other_devices.check_names()
    config.addinivalue_line(
        "markers", "core: kernels and semantics, without compile, docs and the wider torch machinery"
    )
    config.addinivalue_line("markers", "interpreted: some of core on the PTX interpreter, see other_devices.py")


def pytest_collection_modifyitems(config, items):
    repeated = [item for item in items if repeats(item)]
    config.hook.pytest_deselected(items=repeated)
    items[:] = [item for item in items if not repeats(item)]
    for item in items:
        if item.path.stem.removeprefix("test_") in CORE:
            item.add_marker("core")
    for item in other_devices.some_of_each_test([item for item in items if item.get_closest_marker("core")]):
        item.add_marker("interpreted")


def repeats(item):
    """Whether a test would only run again what it runs on the level below: the levels named after bfloat16 have kernels
    of their own for that dtype alone (tests/cpp/test_dispatch.cpp)."""
    params = getattr(item, "callspec", None) and item.callspec.params
    if not params or "bf16" not in params.get("isa", ""):
        return False
    dtypes = {dtype_of(x) for x in params.values()} - {None}
    return bool(dtypes) and torch.bfloat16 not in dtypes


def dtype_of(parameter):
    """The dtype that a parameter is, or that the inputs it describes have, if any."""
    if isinstance(parameter, torch.dtype):
        return parameter
    if isinstance(parameter, dict):
        return parameter.get("dtype")
    return getattr(parameter, "dtype", None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """A failure names the level that was in use."""
    report = yield
    if report.failed:
        report.sections.append(("ISA level", mha_ext.isa()))
    return report


@pytest.fixture(params=other_devices.NAMES or LEVELS)
def isa(request, leave_torch_as_found):
    """Run the test on one ISA level, or skip it where the machine lacks that level; or on another device instead."""
    if other_devices.NAMES:
        with other_devices.on(request.param):
            yield request.param
        return
    here = mha_ext.supported_isas()
    if request.param not in here:
        pytest.skip(f"ISA level {request.param} is absent: this machine and MHA_EXT_ISA leave {', '.join(here)}")
    mha_ext.set_isa(request.param)
    yield request.param


@pytest.fixture(autouse=True)
def leave_torch_as_found():
    """A fixed seed at the start; the thread count, the level and the default dtype restored at the end.

    One thread: these inputs are small, and waking a second costs more than it does. test_determinism.py takes more.
    """
    threads, level, dtype = torch.get_num_threads(), mha_ext.isa(), torch.get_default_dtype()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    mha_ext.set_isa(level)


@pytest.fixture
def fresh_compiler():
    """No compiled function of an earlier test answers in this one."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()
