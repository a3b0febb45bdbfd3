"""The choice of the instruction-set level, and what the shared object shows to the outside."""

import os
import re
import shutil
import subprocess
import sys

import pytest

import mha_ext
from mha_ext import _load

KNOWN = ("generic", "avx2", "avx512", "avx512_bf16", "amx_bf16")
ABSENT = [name for name in KNOWN if name not in mha_ext.supported_isas()]


def level_in_new_process(cap):
    """What `mha_ext.isa()` says, or the error, in a process that starts with MHA_EXT_ISA=cap."""
    code = "import mha_ext\ntry: print(mha_ext.isa())\nexcept ValueError as error: print('ValueError:', error)"
    environment = {**os.environ, "MHA_EXT_ISA": cap}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_levels_are_known_and_ordered():
    levels = mha_ext.supported_isas()
    assert levels == list(KNOWN[: len(levels)])


@pytest.mark.parametrize("cap", mha_ext.supported_isas())
def test_environment_caps_the_level(cap):
    assert level_in_new_process(cap) == cap


def test_empty_cap_means_the_highest():
    assert level_in_new_process("") == mha_ext.supported_isas()[-1]


@pytest.mark.parametrize("cap", ["sse9", "AVX2", *ABSENT])
def test_cap_that_cannot_be(cap):
    possible = ", ".join(mha_ext.supported_isas())
    text = f"MHA_EXT_ISA must be one of the levels this machine has ({possible}), got '{cap}'"
    assert level_in_new_process(cap) == f"ValueError: {text}"


@pytest.mark.parametrize("name", ["sse9", "", *ABSENT])
def test_set_isa_that_cannot_be(name):
    before = mha_ext.isa()
    possible = re.escape(", ".join(mha_ext.supported_isas()))
    with pytest.raises(
        ValueError, match=rf"^isa must be one of the levels this machine has \({possible}\), got '{name}'$"
    ):
        mha_ext.set_isa(name)
    assert mha_ext.isa() == before


@pytest.fixture(scope="module")
def dynamic_symbols():
    """(kind, name) of every dynamic symbol of _C."""
    if shutil.which("nm") is None:
        pytest.skip("nm (binutils) is not installed")
    done = subprocess.run(["nm", "-DC", _load.shared_objects["_C"]], capture_output=True, text=True, check=True)
    return [re.match(r"\s*[0-9a-f]*\s+(\w) (.*)", line).groups() for line in done.stdout.splitlines()]


def test_only_the_stable_abi_is_needed(dynamic_symbols):
    needed = [name for kind, name in dynamic_symbols if kind == "U"]
    assert any(name.startswith("aoti_torch_") for name in needed), "nm shows no use of torch at all"
    assert [name for name in needed if re.search(r"\b(at|c10|torch::(jit|autograd|detail))::", name)] == []


def test_kernels_are_not_exported(dynamic_symbols):
    """Another library in the process must neither see the kernels nor replace them."""
    exported = [name for kind, name in dynamic_symbols if kind in "TDBR"]
    assert "PyInit__C" in exported
    assert [name for name in exported if "mha" in name] == []
