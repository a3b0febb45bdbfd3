"""The benchmark beside other libraries: are all checked, is the missing one told, does the faster way count?"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import mha_ext
from mha_ext.bench.cases import OURS, PLAIN, SDPA, Work
from mha_ext.bench.machine import Peaks
from mha_ext.bench.records import Result, Row, Run
from mha_ext.bench.timing import Timing
from mha_ext.cli import WIDTH_IN_FILES

sys.path.append(str(Path(__file__).parent.parent))  # last, so that mha_ext is the one that is installed

from benchmarks.peers import __main__ as program
from benchmarks.peers import field, report, task
from benchmarks.peers.measure import measure
from benchmarks.peers.peer import ALL_DTYPES, Call, Peer, Unavailable

OPTIONAL = [peer for peer in field.ALL if peer.packages != ("torch",)]
TINY_FORWARD = task.Task(task.FORWARD, task.QUICK, torch.float32)


@pytest.fixture(autouse=True)
def _threads_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """--threads holds for the process, which the tests share. Measuring peaks takes seconds for nothing."""
    monkeypatch.setattr(Peaks, "measure", lambda peaks, work, dtype: None)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def measured(tasks: Sequence[task.Task], *peers: Peer) -> Run:
    return measure(tasks, [field.ALL[0], *peers], quick=True, progress=lambda text, count: None)


def shown(table: Any) -> str:
    console = Console(width=WIDTH_IN_FILES, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_the_program_measures_what_torch_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="--plot needs matplotlib, which is not installed")
    figures, chart = tmp_path / "peers.json", tmp_path / "peers.png"
    options = [
        "--quick",
        "--threads",
        "1",
        "--peers",
        SDPA,
        PLAIN,
        "nn.MHA",
        "--json",
        str(figures),
        "--plot",
        str(chart),
    ]
    assert program.main(options) == 0, capsys.readouterr().out
    run = Run.load(figures)
    timed = {(result.name, result.dtype): set(result.times) for result in run.results}
    for dtype in ("f32", "bf16"):
        for kind in ("forward", "causal", "padded", "decode", "train", "train-causal"):
            assert timed[kind, dtype] == {OURS, SDPA, PLAIN}, f"{kind}, {dtype}"
        assert timed["weights", dtype] == {OURS, PLAIN}
        assert timed["layer", dtype] == {OURS, "nn.MHA"}
    assert timed["forward", "f16"] == {OURS, SDPA, PLAIN}
    assert run.machine["libraries"][SDPA] == importlib.metadata.version("torch")
    assert run.machine["libraries"][OURS] == mha_ext.__version__
    assert chart.read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    assert "train-causal  2,2,23,16" in text
    assert "wrong, so" not in text


@pytest.mark.parametrize("peer", OPTIONAL, ids=lambda peer: peer.name)
def test_every_library_agrees_with_float64_wherever_it_says_it_can(peer: Peer) -> None:
    try:
        version = peer.version
    except Unavailable as reason:
        pytest.skip(f"{peer.library}: {reason}")
    every_kind, every_dtype = ([*task.KINDS], ALL_DTYPES[:1]), ((task.CAUSAL,), ALL_DTYPES[1:])
    todo = [one for some in (every_kind, every_dtype) for one in task.tasks(*some, quick=True) if peer.does(one)]
    run = measured(todo, peer)
    right = [result for result in run.results if peer.name in result.times]
    wrong = [(result.name, result.dtype, result.wrong) for result in run.results if result.wrong]
    assert not wrong, f"{peer.name} {version}: {wrong}"
    # A library may refuse a task, and the version at hand decides which; never all of float32.
    assert {"f32"} <= {result.dtype for result in right}, run.machine["refusals"]
    assert len(right) + len(run.machine["refusals"]) == len(todo)


def test_flex_attention_agrees_with_float64() -> None:
    flex = next(peer for peer in field.ALL if peer.library == "Flex")
    run = measured([task.Task(task.PADDED, task.QUICK, torch.float32)], flex)
    if run.machine["refusals"]:
        pytest.skip(f"no C++ compiler for torch.compile? {run.machine['refusals']}")
    (padded,) = run.results
    assert not padded.wrong, padded
    assert flex.name in padded.times


def _sdpa_with(scale: float) -> Any:
    def prepare(one: task.Task, inputs: Sequence[torch.Tensor]) -> Call:
        attention = torch.nn.functional.scaled_dot_product_attention
        return one.passes(lambda *qkv: attention(*qkv, scale=scale), inputs)

    return prepare


def _refuses(one: task.Task, inputs: Sequence[torch.Tensor]) -> Call:
    raise RuntimeError("no kernel for this\nand a long story")


def test_wrong_missing_and_refusing_libraries_are_shown_and_not_timed() -> None:
    forward = frozenset({task.FORWARD})
    run = measured(
        [TINY_FORWARD],
        Peer("liar", ("torch",), forward, _sdpa_with(0.3)),
        Peer("honest", ("torch",), forward, _sdpa_with(0.25)),
        Peer("absent", ("torch", "no-such-distribution"), forward, _sdpa_with(0.25)),
        Peer("coy", ("torch",), forward, _refuses),
        Peer("narrow", ("torch",), forward, _refuses, dtypes=(torch.float16,)),
    )
    (result,) = run.results
    assert set(result.times) == {OURS, "honest"}
    assert [row.contestant for row in result.wrong] == ["liar"]
    assert run.machine["missing"] == {"absent": "not installed: pip install torch no-such-distribution"}
    refusal = {"peer": "coy", "case": "forward 2,2,23,16", "reason": "RuntimeError: no kernel for this"}
    assert run.machine["refusals"] == [refusal]
    assert "wrong" in shown(report.result_table(run, "f32"))
    assert "not installed: pip install torch no-such-distribution" in shown(report.library_table(run))
    assert "RuntimeError: no kernel for this" in shown(report.refusal_table(run))


def test_a_failure_of_ours_is_no_refusal() -> None:
    with pytest.raises(RuntimeError, match="no kernel for this"):
        measure(
            [TINY_FORWARD],
            [Peer(OURS, ("torch",), frozenset({task.FORWARD}), _refuses)],
            True,
            lambda text, count: None,
        )


def row(contestant: str, seconds: float | None) -> Row:
    timing = None if seconds is None else Timing(seconds, seconds, 0.0, 3)
    return Row(contestant, 0.0 if timing else 2.0, 1.0, timing)


def test_the_fastest_way_of_a_library_counts() -> None:
    rows = [row(OURS, 2.0), row("JAX: slow", 8.0), row("JAX: fast", 5.0), row("JAX: wrong", None), row("Flex", None)]
    run = Run({"libraries": {OURS: "0", "JAX": "1", "Flex": "2", "SDPA": "3"}}, False)
    run.results.append(Result("peers", "forward", "1,1,8,8", "f32", Work(flops=1), rows))
    columns = report.result_table(run, "f32").columns
    assert [str(cell) for column in columns for cell in column.cells] == [
        "forward", "1,1,8,8", "2 s", "2.50x", "wrong", "", "0%",
    ]  # fmt: skip
    fastest = report.fastest(run.results[0], "JAX")
    assert fastest is not None
    assert fastest.contestant == "JAX: fast"


def test_a_case_in_which_all_are_wrong_is_shown() -> None:
    run = Run({"libraries": {OURS: "0", "JAX": "1"}}, False)
    run.results.append(Result("peers", "forward", "1,1,8,8", "f32", Work(flops=1), [row(OURS, None), row("JAX", None)]))
    columns = report.result_table(run, "f32").columns
    assert [str(cell) for column in columns for cell in column.cells] == ["forward", "1,1,8,8", "wrong", "wrong", ""]


def test_work_counts_only_keys_that_are_no_padding() -> None:
    padded, full = (task.Task(kind, task.QUICK, torch.float32) for kind in (task.PADDED, task.FORWARD))
    assert padded.keep is not None
    assert padded.work.flops == full.work.flops * padded.keep.float().mean()
    assert padded.keep.sum(-1).flatten().tolist() == [11, 23]  # half of the keys, and all


@pytest.mark.parametrize("sizes", ["1,2,3", "1,2,x,4", "1,2,0,4", ""])
def test_sizes_that_are_none_are_refused(sizes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(["--shapes", sizes])
    assert f"expected B,H,L,D, got {sizes!r}" in capsys.readouterr().err


def test_given_sizes_hold_for_every_kind() -> None:
    sizes = [program._problem("2,3,5,16"), program._problem("2,3,7,16")]
    todo = list(task.tasks([task.FORWARD, task.DECODE], [torch.float32], sizes))
    assert [(one.kind, str(one.problem)) for one in todo] == [
        ("forward", "2,3,5,16"), ("forward", "2,3,7,16"), ("decode", "2,3,1,5,16"), ("decode", "2,3,1,7,16"),
    ]  # fmt: skip
