"""The checks of the PTX interpreter (tests/ptxvm): planted faults are reported, right code is left alone."""

import contextlib
import ctypes
import re
from pathlib import Path

import numpy as np
import pytest
from ptxvm.build import cuda_home
from ptxvm.harness import CACHE, FoundFaults, Interpreter, build_kernels
from ptxvm.ptx import Ptx, body_kernel

pytestmark = pytest.mark.skipif(cuda_home() is None, reason="nvcc is not installed: no PTX to interpret")

FAULTS = Path(__file__).parent / "ptxvm" / "faults"


@pytest.fixture(scope="session")
def fault_kernels():
    return Interpreter(build_kernels(sorted(FAULTS.glob("*.cu")), CACHE))


def run_fault(vm, name, n=64):
    """Run one of the kernels of tests/ptxvm/faults; return the findings and the result."""
    data, out = np.arange(1, 65, dtype=np.float32), np.zeros(128, dtype=np.float32)
    found = []
    with contextlib.suppress(FoundFaults), vm.checked(const_in=data, out=out):
        error = getattr(vm.library, f"run_{name}")(
            ctypes.c_void_p(out.ctypes.data), ctypes.c_void_p(data.ctypes.data), n
        )
        found = vm.findings()
    return found, error, data, out


def marked_line(name):
    """'races.cu:12', where the line carries the mark of the fault."""
    for file in FAULTS.glob("*.cu"):
        for number, line in enumerate(file.read_text().splitlines(), start=1):
            if line.endswith(f"// FAULT {name}"):
                return f"{file.name}:{number}"
    return ""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("read_before_barrier", "race: read after write"),
        ("write_before_barrier", "race: write after read"),
        ("two_writers", "race: write after write"),
        ("missing_syncwarp", "race: read after write"),
        ("barrier_of_others", "race: read after write"),
        ("plain_read_of_atomic", "race: read after write"),
        ("missing_wait", "access to the destination of an unfinished cp.async"),
        ("wait_for_too_few", "access to the destination of an unfinished cp.async"),
        ("wait_without_barrier", "race: read after write"),
        ("overwritten_in_flight", "access to the destination of an unfinished cp.async"),
        ("source_out_of_bounds", "global memory access out of bounds"),
        ("load_past_end", "global memory access out of bounds"),
        ("store_before_start", "global memory access out of bounds"),
        ("store_to_input", "write to read-only memory"),
        ("shared_past_end", "shared memory access out of bounds"),
        ("misaligned", "misaligned access"),
        ("uninitialised", "read of uninitialised shared memory"),
        ("shuffle_in_branch", "divergent .sync instruction"),
        ("shuffle_from_outside", "shuffle from an inactive lane"),
        ("barrier_in_branch", "warps wait for one barrier at different places"),
        ("barrier_of_too_many", "barrier not reached by all"),
        ("trapped", "trap by thread 40"),
        ("unknown_instruction", "cannot execute"),
    ],
)
def test_planted_fault_is_reported(fault_kernels, name, message):
    found, *_ = run_fault(fault_kernels, name)
    reports = [finding for finding in found if finding.startswith(message)]
    assert reports, found
    assert marked_line(name) in reports[0]


def test_endless_loop_is_stopped(fault_kernels):
    data, out = np.zeros(64, dtype=np.float32), np.zeros(64, dtype=np.float32)
    with pytest.raises(FoundFaults, match="endless loop"), fault_kernels.checked(limit=10000, data=data, out=out):
        fault_kernels.library.run_endless(ctypes.c_void_p(out.ctypes.data), ctypes.c_void_p(data.ctypes.data), 64)


def test_missing_wait_is_named_as_never_waited_for(fault_kernels):
    found, *_ = run_fault(fault_kernels, "missing_wait")
    assert any(finding.startswith("cp.async never waited for") for finding in found)


def test_fewer_blocks_find_what_one_turn_leaves_for_the_next(fault_kernels):
    assert run_fault(fault_kernels, "barrier_between_turns")[0] == []
    fault_kernels.most_blocks(2)
    found, *_ = run_fault(fault_kernels, "barrier_between_turns")
    fault_kernels.most_blocks(2**32 - 1)
    assert found[0].startswith("race: read after write")
    assert marked_line("barrier_between_turns") in found[0]


@pytest.mark.parametrize("name", ["pipeline", "warp_exchange", "counters", "early_exit", "by_value"])
def test_right_code_gives_no_finding(fault_kernels, name):
    found, error, data, out = run_fault(fault_kernels, name)
    assert (found, error) == ([], 0)
    np.testing.assert_array_equal(out[:64], 2 * data)


@pytest.mark.parametrize("name", ["neighbouring_bytes", "producer_and_consumer"])
def test_right_synchronisation_gives_no_finding(fault_kernels, name):
    assert run_fault(fault_kernels, name)[0] == []


def test_shared_memory_above_48_kb_needs_the_attribute(fault_kernels):
    found, error, *_ = run_fault(fault_kernels, "too_much_shared")
    assert (found, error) == ([], 1)  # cudaErrorInvalidValue
    found, error, *_ = run_fault(fault_kernels, "enough_shared")
    assert (found, error) == ([], 0)


@pytest.mark.parametrize(("name", "expected"), [("bounded", 701), ("tall_grid", 9)])
def test_launches_that_the_driver_refuses(fault_kernels, name, expected):
    """cudaErrorLaunchOutOfResources and cudaErrorInvalidConfiguration: nothing runs."""
    found, error, _, out = run_fault(fault_kernels, name)
    assert (found, error) == ([], expected)
    assert not out.any()


def test_checked_raises_with_the_findings(fault_kernels):
    data, out = np.zeros(64, dtype=np.float32), np.zeros(64, dtype=np.float32)
    line = re.escape(marked_line("load_past_end"))
    with pytest.raises(FoundFaults, match=line), fault_kernels.checked(data=data, out=out):
        fault_kernels.library.run_load_past_end(ctypes.c_void_p(out.ctypes.data), ctypes.c_void_p(data.ctypes.data), 64)


def test_any_memory_allows_what_is_not_registered(fault_kernels):
    """Read-only memory stays so."""
    data, out = np.ones(64, dtype=np.float32), np.zeros(64, dtype=np.float32)
    arguments = [ctypes.c_void_p(out.ctypes.data), ctypes.c_void_p(data.ctypes.data), 64]
    with fault_kernels.checked(any_memory=True):
        fault_kernels.library.run_pipeline(*arguments)
    assert (out == 2).all()
    with pytest.raises(FoundFaults, match="read-only"), fault_kernels.checked(any_memory=True, const_data=data):
        fault_kernels.library.run_store_to_input(*arguments)


def test_statistics_count_bank_conflicts_and_sectors():
    """A stride of 128 bytes: in shared memory all lanes meet in one bank, in global memory each takes a sector."""
    body = """ld.param.u64 %d1, [in]; mad.wide.u32 %d1, %r0, 128, %d1; ld.global.u32 %r1, [%d1]; mov.u32 %r2, buffer;
    mad.lo.u32 %r3, %r0, 128, %r2; st.shared.u32 [%r3], %r1; ld.shared.u32 %r4, [%r3]; st.global.u32 [%out], %r4;"""
    ptx = Ptx(body_kernel(body, shared=4096))
    ptx.run("k", np.zeros(1024, dtype=np.uint32), np.zeros(32, dtype=np.uint32), statistics=True)
    by_opcode = {line["opcode"]: line for line in ptx.vm.statistics()}
    assert (by_opcode["st.shared.u32"]["wavefronts"], by_opcode["st.shared.u32"]["ideal_wavefronts"]) == (32, 1)
    assert (by_opcode["ld.global.u32"]["sectors"], by_opcode["ld.global.u32"]["ideal_sectors"]) == (32, 4)
    assert by_opcode["st.global.u32"]["sectors"] in (4, 5)  # by how the array is aligned
