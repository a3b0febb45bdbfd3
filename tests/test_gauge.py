"""The machine code of the CUDA kernels against the stored table: worse fails, better asks for it to be renewed."""

import json
import sys
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "gauge"))
import bound
import gauge
import sass

LIBRARY = gauge.library()
MISSING = gauge.missing_tools() + ([] if LIBRARY else ["mha_ext._C_cuda"])
needs_build = pytest.mark.skipif(bool(MISSING), reason=f"not found: {', '.join(MISSING)}")
# Instructions per tensor-core instruction move a little with every change of the code around a loop.
SLACK = 1.03

TWO_LOOPS = """
.text.kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0020*/              @!PT LDS RZ, [RZ] ;
.L_x_2:
        /*0030*/                   FFMA R0, R1, R2, R0 ;
        /*0040*/               @P0 BRA `(.L_x_2) ;
        /*0050*/                   LDL R3, [R1] ;
        /*0060*/               @P1 BRA `(.L_x_1) ;
        /*0070*/                   EXIT ;
"""


def test_the_loop_with_tensor_instructions_is_found():
    (function,) = sass.parse(TWO_LOOPS)
    assert function.name == "kernel"
    assert [i.base for i in function.main_loop()] == ["HMMA", "FFMA", "BRA", "LDL", "BRA"]
    assert gauge.main_loop(function) == {
        "loop": 5, "loop_control": 2, "loop_float": 1, "loop_local": 1, "loop_tensor": 1,
    }  # fmt: skip


def test_code_without_multiplications_has_no_main_loop():
    (function,) = sass.parse(TWO_LOOPS.replace("HMMA.16816.F32", "IADD3").replace("FFMA", "IADD3"))
    assert function.main_loop() == []


def test_the_bound_is_the_unit_that_is_busy_longest():
    load = sass.Instruction(0, "LDSM.16.M88.4", "")
    assert [load.shared_bytes, sass.Instruction(0, "LDS.U.128", "").shared_bytes] == [512, 512]
    row = {"loop": 40, "loop_tensor": 8, "loop_shared_bytes": 8 * load.shared_bytes, "loop_special": 1}
    assert bound.busy(row, "sm_80") == {"issue": 40, "shared": 128, "tensor": 64, "float": 0, "double": 0, "special": 8}
    assert bound.bound(row, "sm_80") == ("shared", 0.5)
    assert bound.bound(row, "sm_90") == ("shared", 0.25)
    assert bound.bound({"loop": 10}, "sm_80") is None


def test_a_library_in_place_is_found(monkeypatch, tmp_path):
    (tmp_path / "mha_ext").mkdir()
    built = tmp_path / "mha_ext" / "_C_cuda.so"
    built.touch()
    monkeypatch.setattr(gauge, "HERE", tmp_path / "tests" / "gauge")
    assert gauge.library() == built


def test_storing_keeps_other_architectures(tmp_path):
    old, new = {"kernel": {"registers": 40}}, {"kernel": {"registers": 32}}
    file = tmp_path / "table.json"
    file.write_text(gauge.text_of_json({"sm_80": old, "sm_90": old}))
    assert gauge.store({"sm_80": new, "sm_120": new}, file) == ["sm_90"]
    assert json.loads(file.read_text()) == {"sm_120": new, "sm_80": new, "sm_90": old}


@pytest.fixture(scope="module")
def measured():
    table = gauge.measure_all(LIBRARY)
    print("\n" + gauge.text_of(table))  # shown by pytest -s
    return table


@needs_build
def test_no_loop_touches_local_memory(measured):
    """No register is spilt where the work is done."""
    spilt = [f"{arch} {name}" for arch, rows in measured.items() for name, row in rows.items() if row.get("loop_local")]
    assert not spilt, "\n".join(spilt)


@needs_build
def test_no_kernel_is_worse_than_in_the_table(measured):
    stored = json.loads(gauge.TABLE.read_text())
    archs = [arch for arch in stored if arch in measured]
    if not archs:
        pytest.skip(f"this library has code for {', '.join(measured)} only")
    renew = "renew the table: python tests/gauge/gauge.py --write"
    worse, better = [], []
    for arch in archs:
        assert measured[arch].keys() == stored[arch].keys(), f"{arch}: kernels came or went, {renew}"
        for name, old in stored[arch].items():
            row = measured[arch][name]
            pairs = [
                (key, row[key], old[key]) for key in ("registers", "stack", "shared", "local_accesses") if key in row
            ]
            if (ratio := gauge.per_tensor(row)) is not None:
                pairs.append(("instructions per tensor instruction", ratio, gauge.per_tensor(old) or 0))
            for key, now, before in pairs:
                text = f"{arch} {name}: {key} {before:.4g} -> {now:.4g}"
                if now > before * (SLACK if key.startswith("instr") else 1):
                    worse.append(text)
                elif now * SLACK < before:
                    better.append(text)
    if better:
        warnings.warn(f"{renew}, it has become better:\n" + "\n".join(better), stacklevel=1)
    assert not worse, "\n".join(worse)
