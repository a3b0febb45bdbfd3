"""The benchmark suite itself: are operations counted right, wrong results caught, and figures kept?"""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest
import torch

from mha_ext.bench import cases, oracle, run
from mha_ext.bench.cases import OURS, Case, Contest, Work
from mha_ext.bench.machine import Peaks, percent_of_peak, percent_of_tile_peak
from mha_ext.bench.report import comparison_table, format_seconds, speedups
from mha_ext.bench.suite_attention import Layer, Model
from mha_ext.bench.suite_steps import Sizes
from mha_ext.bench.timing import Budget, Timing, time_interleaved

# Operations, by counting them one at a time.


def counted_attention(batch: int, heads: int, queries: int, keys: int, head_dim: int, is_causal: bool) -> int:
    """Multiplications and additions of Q K^T and P V, over the pairs that see each other."""
    count = 0
    for _, _, i, j in itertools.product(range(batch), range(heads), range(queries), range(keys)):
        if not is_causal or j <= i:
            count += 2 * head_dim  # one score
            count += 2 * head_dim  # one value, weighted and added
    return count


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (3, 5), (5, 3), (4, 4), (0, 3), (3, 0)])
def test_visible_pairs_are_those_counted(queries: int, keys: int, is_causal: bool) -> None:
    pairs = sum(not is_causal or j <= i for i in range(queries) for j in range(keys))
    assert cases.visible_pairs(queries, keys, is_causal) == pairs


@pytest.mark.parametrize("is_causal", [False, True])
def test_operations_of_a_model_are_those_counted(is_causal: bool) -> None:
    model = Model("small", 2, 3, 1, 5, 7, is_causal)
    assert model.work(2).flops == counted_attention(2, 3, 5, 5, 7, is_causal)


def test_operations_of_a_step_agree_with_torch() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    sizes = Sizes(2, 3, 5, 6, 7)
    query, key = torch.randn(sizes.query), torch.randn(sizes.key)
    with FlopCounterMode(display=False) as counter:
        torch.matmul(query, key.transpose(-1, -2))
    assert sizes.products(1).flops == counter.get_total_flops()


def test_operations_of_a_layer_agree_with_torch() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    from mha_ext.bench.suite_attention import PlainMultiHeadAttention

    layer = Layer("small", 2, 5, 12, 3)
    module = PlainMultiHeadAttention(layer.d_model, layer.n_heads, fused=False)
    x = torch.randn(2, 5, 12, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        module(x, x, x)[0].sum().backward()
    assert layer.work(3).flops == counter.get_total_flops()


def test_bytes_of_a_softmax_pass() -> None:
    work = Sizes(2, 3, 5, 6, 7).passes(torch.bfloat16, reads=2, writes=1)
    assert (work.bytes_read, work.bytes_written) == (2 * 2 * 3 * 5 * 6 * 2, 2 * 3 * 5 * 6 * 2)


# The gate: every kind of wrong result is caught, every honest one let through.


def softmax_contest(wrong: torch.Tensor | None = None) -> Contest:
    (scores,) = cases.random_inputs(torch.float32, (4, 16, 16))
    right = torch.softmax(scores, -1)
    return Contest(
        (scores,),
        lambda scores: (torch.softmax(scores, -1),),
        {OURS: lambda: (right,), "another": lambda: (right if wrong is None else wrong,)},
    )


def case_of(contest: Contest) -> Case:
    return Case("softmax", "4,16,16", torch.float32, Work(flops=1000), 16, lambda: contest)


BUDGET = Budget(samples=3, seconds=1.0, sample_seconds=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fault", ["none", "scale", "mask", "head", "nan"])
def test_wrong_results_are_told_from_rounding(dtype: torch.dtype, fault: str) -> None:
    inputs = cases.random_inputs(dtype, (2, 3, 33, 16), (2, 3, 40, 16), (2, 3, 40, 16))

    def maths(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor]:
        scores = query @ key.transpose(-1, -2) / math.sqrt(16)
        return (torch.softmax(scores, -1) @ value,)

    expected, allowed = oracle.error_allowed(maths, inputs, terms=40)
    query, key, value = inputs
    (result,) = {
        "none": lambda: maths(query, key, value),
        "scale": lambda: maths(query * 1.25, key, value),
        "mask": lambda: maths(query, key[..., :-1, :], value[..., :-1, :]),
        "head": lambda: maths(query, key.flip(-3), value),
        "nan": lambda: maths(query * math.nan, key, value),
    }[fault]()
    assert oracle.judge((result,), expected, allowed).passed == (fault == "none")


def test_a_wrong_contestant_is_not_timed() -> None:
    result = run.run_case("test", case_of(softmax_contest(wrong=torch.zeros(4, 16, 16))), BUDGET)
    assert [row.contestant for row in result.wrong] == ["another"]
    assert speedups(result) == {}


def test_a_result_of_another_shape_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^the result has shape \(4, 16\), the reference \(4, 16, 16\)$"):
        run.run_case("test", case_of(softmax_contest(wrong=torch.zeros(4, 16))), BUDGET)


# Timing


def test_contestants_take_turns() -> None:
    calls: list[str] = []
    budget = Budget(samples=4, seconds=60.0, sample_seconds=0.0)  # one call a sample
    timings = time_interleaved({name: lambda name=name: calls.append(name) for name in "ab"}, budget)
    warm_up, turns = calls[:2], calls[2:]
    assert warm_up == ["a", "b"]
    assert turns == ["a", "b"] * 4
    assert [len(timing.samples) for timing in timings.values()] == [4, 4]


def test_the_clock_ends_a_long_case_but_never_before_the_least_samples() -> None:
    budget = Budget(samples=100, seconds=0.0, sample_seconds=0.0, least_samples=3)
    assert len(time_interleaved({"a": lambda: None}, budget)["a"].samples) == 3


def test_median_and_spread() -> None:
    timing = Timing((1.0, 2.0, 3.0, 4.0, 100.0))
    assert timing.median == 3.0
    assert timing.spread == pytest.approx((4.0 - 2.0) / 3.0)


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (4.5e-6, "4.5 us"), (3e-8, "30 ns")]
)
def test_seconds_are_written_in_a_unit_that_fits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


# Percent of peak


def test_percent_of_peak_of_products_and_of_streams() -> None:
    rates = {"fma_f32": 100.0, "dot_bf16": 50.0, "amx_bf16": 1000.0, "read_bandwidth": 10.0, "write_bandwidth": 20.0}
    product = Work(flops=10**9)
    assert percent_of_peak(product, "float32", 0.02, rates) == pytest.approx(50)
    assert percent_of_peak(product, "bfloat16", 0.02, rates) == pytest.approx(50)  # of the faster of the two ways
    assert percent_of_tile_peak(product, "bfloat16", 0.02, rates) == pytest.approx(5)
    assert percent_of_tile_peak(product, "float32", 0.02, rates) is None
    assert percent_of_peak(product, "float64", 0.02, rates) is None  # not measured, so not claimed
    stream = Work(bytes_read=10**9, bytes_written=10**9)  # 0.1 s of reading and 0.05 s of writing
    assert percent_of_peak(stream, "float32", 0.3, rates) == pytest.approx(50)
    assert percent_of_peak(stream, "float32", 0.3, {}) is None


def test_the_measured_peaks_are_plausible() -> None:
    from mha_ext._load import core

    kinds = core.peak_kinds()
    assert {"read_bandwidth", "write_bandwidth"} <= set(kinds)
    one = {kind: core.measure_peak(kind, 1) for kind in kinds}
    # From a slow core at one operation a cycle to the largest matrix unit: a loop that the compiler had cut short, or
    # one that waited for memory, would lie outside.
    assert all(0.1 < rate < 20_000 for rate in one.values()), one


def test_float32_has_twice_the_lanes_of_float64() -> None:
    from mha_ext._load import core

    if "fma_f64" not in core.peak_kinds():
        pytest.skip("no multiply-add loop for this processor")
    peaks = Peaks(threads=1)
    for _ in range(5):  # the best of five: a busy machine takes the core away now and then
        peaks.measure(Work(flops=1), "float32")
        peaks.measure(Work(flops=1), "float64")
    # Between the true ratio of 2 and any error in the loops' counts lies a factor of 1.5 at least.
    assert 2 / 1.5 < peaks.rates["fma_f32"] / peaks.rates["fma_f64"] < 2 * 1.5


@pytest.mark.parametrize(
    ("kind", "threads", "message"),
    [
        ("fma_f8", 1, r"^kind must be one of .*, got 'fma_f8'$"),
        ("fma_f32", 0, r"^threads must lie in \[1, 1024\], got 0$"),
        ("fma_f32", 1025, r"^threads must lie in \[1, 1024\], got 1025$"),
    ],
)
def test_measure_peak_names_what_is_wrong(kind: str, threads: int, message: str) -> None:
    from mha_ext._load import core

    with pytest.raises(ValueError, match=message):
        core.measure_peak(kind, threads)


NO_ROOM_FOR_THREADS = """
import resource
from mha_ext._load import core
with open("/proc/self/statm") as sizes:
    used = int(sizes.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**26,) * 2)  # room for some stacks, not for a thousand
try:
    core.measure_peak("fma_f32", 1000)
except RuntimeError as error:
    print("raised", error)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits a process's memory as Linux does")
def test_a_thread_that_cannot_start_is_an_exception() -> None:
    """The threads that did start are joined: destroying a running one would abort the process."""
    from mha_ext._load import core

    if "fma_f32" not in core.peak_kinds():
        pytest.skip("no multiply-add loop for this processor")
    done = subprocess.run([sys.executable, "-c", NO_ROOM_FOR_THREADS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("raised"), done.stdout


def test_peaks_keep_the_best_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    from mha_ext.bench import machine

    class Core:
        rates = iter([3.0, 5.0, 4.0])

        def peak_kinds(self) -> list[str]:
            return ["fma_f32", "read_bandwidth"]

        def measure_peak(self, kind: str, threads: int) -> float:
            return next(self.rates)

    monkeypatch.setattr(machine, "core", Core())
    peaks = Peaks(threads=1)
    for _ in range(3):
        peaks.measure(Work(flops=1), "float32")
    assert peaks.rates == {"fma_f32": 5.0}  # and no bandwidth: a product does not stream

    Core.rates = iter([7.0])  # one measurement, for two calls
    for _ in range(2):
        peaks.measure(Work(bytes_read=1), "float32")
    assert peaks.rates == {"fma_f32": 5.0, "read_bandwidth": 7.0}


# Files


def small_run() -> run.Run:
    kept = run.Run({"cpu": "a CPU", "threads": 1}, quick=True, peaks={"fma_f32": 100.0})
    kept.results.append(run.run_case("test", case_of(softmax_contest()), BUDGET))
    return kept


def test_json_round_trip(tmp_path) -> None:
    kept = small_run()
    kept.save(tmp_path / "a.json")
    assert run.Run.load(tmp_path / "a.json") == kept


def test_comparison_of_a_run_with_itself_is_one() -> None:
    kept = small_run()
    table = comparison_table(kept, kept, ("a.json", "a.json"))
    *_, change = ([str(cell) for cell in column.cells] for column in table.columns)
    assert change == ["1.00", "1.00"]  # the case, and the mean


def test_comparison_needs_a_case_in_common() -> None:
    kept = small_run()
    with pytest.raises(ValueError, match=r"^a\.json and b\.json have no case in common$"):
        comparison_table(kept, run.Run({}, quick=True), ("a.json", "b.json"))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 0}', '{"schema": 1, "results": [{}]}'])
def test_foreign_files_are_refused(tmp_path, text: str) -> None:
    path = tmp_path / "foreign.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"foreign\.json (is no result of 'mha-ext bench --json'|has schema 0)"):
        run.Run.load(path)


def test_a_full_suite_has_each_case_once() -> None:
    listed = run.listed(tuple(run.SUITES), quick=False)
    names = [(suite, case.name, case.shape, case.dtype) for suite, case in listed]
    assert len(set(names)) == len(names)
