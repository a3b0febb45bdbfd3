"""The command line, as a user calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import mha_ext
from mha_ext import _load, cli, demo
from mha_ext._load import why_no_gpu
from mha_ext.bench import run as bench_run
from mha_ext.bench.records import Run
from mha_ext.bench.run import run_case, run_suites
from mha_ext.bench.suite_attention import TINY
from mha_ext.bench.suites import SUITES


@pytest.fixture(autouse=True)
def _threads_as_before():
    """--threads holds for the process, which the tests share."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = cli.main(arguments)
    return status, capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is printed for wrong arguments."""
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_info_tells_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, "info")
    assert status == 0
    expected = [mha_ext.__version__, torch.__version__, mha_ext.isa(), mha_ext.build_info()["compiler"], "_C_cuda"]
    for part in (*expected, *mha_ext.supported_isas()):
        assert part in text


@pytest.mark.skipif(_load.cuda is None, reason="needs a build with CUDA")
def test_info_tells_what_the_cuda_library_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = run(capsys, "info")
    assert _load.cuda.archs in text
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none that torch sees"
    assert gpu in text


def test_python_m_is_the_same_command() -> None:
    done = subprocess.run([sys.executable, "-m", "mha_ext", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"mha_ext {mha_ext.__version__}\n"


def test_demo_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, "demo")
    assert status == 0
    assert "WRONG" not in text
    for part in ("attention_scores", "masked_softmax", "weighted_sum", "MultiHeadAttention(512, 8)", "gradcheck"):
        assert part in text


@pytest.fixture
def small_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the verdicts, which need no speed table of a real size."""
    monkeypatch.setattr(demo, "TIMED", TINY)


@pytest.mark.usefixtures("small_demo")
def test_demo_fails_when_a_result_is_wrong(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    right = demo.weighted_sum
    monkeypatch.setattr(demo, "weighted_sum", lambda weights, value: right(weights, value) * 1.01)
    status, text = run(capsys, "demo")
    assert status == 1
    assert text.count("WRONG") == 1


@pytest.mark.usefixtures("small_demo")
def test_demo_fails_when_a_gradient_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = demo.attention

    def without_gradient_of_value(query, key, value, **options):
        return right(query, key, value.detach() + 0 * value, **options)

    monkeypatch.setattr(demo, "attention", without_gradient_of_value)
    status, text = run(capsys, "demo")
    assert status == 1
    assert text.count("WRONG") == 1


def test_bench_writes_what_it_measured_and_compares(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    file, picture = tmp_path / "run.json", tmp_path / "run.png"
    status, text = run(
        capsys, "bench", "--quick", "--suite", "overhead", "--threads", "1", "--json", str(file), "--plot", str(picture)
    )
    assert status == 0
    assert "smallest call" in text
    assert picture.read_bytes().startswith(b"\x89PNG")
    kept = json.loads(file.read_text())
    assert kept["machine"]["threads"] == 1
    assert kept["machine"]["torch"] == torch.__version__
    assert kept["machine"]["isa"] == mha_ext.isa()
    assert {row["contestant"] for result in kept["results"] for row in result["rows"]} == {
        "mha_ext",
        "SDPA",
        "plain torch",
    }
    assert all(row["timing"]["best"] <= row["timing"]["median"] for result in kept["results"] for row in result["rows"])

    status, text = run(capsys, "bench", "--compare", str(file), str(file))
    assert status == 0
    assert "geometric mean of 2" in text


def test_every_suite_runs(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, "bench", "--quick", "--threads", "1")
    assert status == 0
    for name, suite in SUITES.items():
        assert (f"suite {name}:" in text) == bool(suite.cases(True))
    assert max(map(len, text.splitlines())) <= cli.WIDTH_IN_FILES
    assert "…" not in text  # nothing was cut off


def test_bench_lists_a_line_a_suite_without_running(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "run_suites", None)  # calling it would fail
    status, text = run(capsys, "bench", "--list")
    assert status == 0
    lines = [line.split()[:2] for line in text.splitlines()]
    assert [[name, str(len(suite.cases(False)))] for name, suite in SUITES.items()] == [
        line for line in lines if line and line[0] in SUITES
    ]


@pytest.mark.skipif(why_no_gpu() is None, reason="there is a GPU")
def test_bench_says_why_a_suite_is_empty(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    file = tmp_path / "run.json"
    status, text = run(capsys, "bench", "--suite", "cuda", "--json", str(file))
    assert status == 1
    assert " ".join(text.split()) == f"suite cuda has no cases here: {why_no_gpu()}"
    assert not file.exists()


def test_bench_keeps_what_it_has_measured_when_it_is_cut_off(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    file, cases = tmp_path / "run.json", []

    def cut_off(*arguments):
        if cases:
            raise KeyboardInterrupt
        cases.append(run_case(*arguments))
        return cases[0]

    monkeypatch.setattr(bench_run, "run_case", cut_off)
    with pytest.raises(KeyboardInterrupt):
        cli.main(["bench", "--quick", "--suite", "overhead", "--json", str(file)])
    assert Run.load(file).results == cases


def test_bench_fails_when_a_result_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = mha_ext.attention
    monkeypatch.setattr(mha_ext, "attention", lambda *tensors, **options: (right(*tensors, **options)[0] + 1, None))
    status, text = run(capsys, "bench", "--quick", "--suite", "overhead")
    assert status == 1
    assert "wrong, so not measured: mha_ext in overhead: no gradient (2,1,4,64), f32: error 1, allowed" in text


def test_a_suite_with_an_environment_runs_in_a_process_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SUITES, "overhead", replace(SUITES["overhead"], environment={"MHA_EXT_ISA": "generic"}))
    monkeypatch.setenv("MHA_EXT_ISA", "none such")  # inherited, it would end that process with an error
    (first, second) = run_suites(["overhead"], quick=True, progress=lambda text, cases: None).results
    assert (first.suite, second.suite) == ("overhead", "overhead")
    assert first.times
    assert first.percent_of_peak is None  # that level has no multiply-add


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: {demo,info,bench}"),
        (("train",), "invalid choice: 'train' (choose from"),
        (("bench", "--suite", "stps"), "argument --suite: invalid choice: 'stps' (choose from"),
        (("bench", "--threads", "0"), "argument --threads: expected a number from 1 to 4096, got '0'"),
        (("demo", "--threads", "two"), "argument --threads: expected a number from 1 to 4096, got 'two'"),
        (("bench", "--compare", "a.json"), "argument --compare: expected 2 arguments"),
        (("bench", "--compare", "/none/a.json", "/none/b.json"), "--compare: [Errno 2] No such file or directory"),
        (("bench", "--json", "/none/a.json"), "--json: there is no directory /none"),
        (("bench", "--json", "/"), "--json: cannot write to /"),
        (("demo", "--threads", "9" * 14), f"argument --threads: expected a number from 1 to 4096, got '{'9' * 14}'"),
        (("bench", "--plot", "/none/a.png"), "--plot: there is no directory /none"),
    ],
)
def test_wrong_arguments_are_explained(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert message in refusal(capsys, *arguments)


def test_plot_without_matplotlib_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    assert "--plot needs matplotlib: pip install 'mha_ext[bench]'" in refusal(capsys, "bench", "--plot", "a.png")
