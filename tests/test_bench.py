"""The benchmark suite itself: are operations counted right, wrong results caught, and figures kept?"""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import mha_ext
from mha_ext.bench import cases, oracle, run
from mha_ext.bench.cases import OURS, PLAIN, Case, Contest, Work
from mha_ext.bench.machine import Peaks, least_seconds
from mha_ext.bench.problem import Problem
from mha_ext.bench.suite_modules import Layer
from mha_ext.bench.suite_steps import Sizes
from mha_ext.bench.timing import Budget, Timing, summary, time_interleaved

# Operations, by counting them one at a time.


def counted_attention(problem: Problem, is_causal: bool) -> dict[cases.Passes, int]:
    """Multiplications and additions, pair by pair of those that see each other."""
    forward = backward = 0
    ranges = map(range, (problem.batch, problem.heads, problem.queries, problem.keys))
    d, dv = problem.head_dim, problem.value_dim or problem.head_dim
    for _, _, i, j in itertools.product(*ranges):
        if not is_causal or j <= i:
            forward += 2 * d  # one score
            forward += 2 * dv  # one value, weighted and added
            backward += 2 * d  # the score again
            backward += 2 * dv + 2 * dv  # gradients of the weight and of the value
            backward += 2 * d + 2 * d  # gradients of the query and of the key
    return {cases.forward: forward, cases.backward: backward, cases.trained: forward + backward}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (3, 5), (5, 3), (4, 4), (0, 3), (3, 0)])
def test_visible_pairs_are_those_counted(queries: int, keys: int, is_causal: bool) -> None:
    pairs = sum(not is_causal or j <= i for i in range(queries) for j in range(keys))
    assert cases.visible_pairs(queries, keys, is_causal) == pairs


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("value_dim", [None, 4])
def test_operations_of_attention_are_those_counted(is_causal: bool, value_dim: int | None) -> None:
    problem = Problem(2, 3, 5, 6, 7, value_dim=value_dim)
    for passes, flops in counted_attention(problem, is_causal).items():
        assert problem.work(passes, cases.visible_pairs(5, 6, is_causal)).flops == flops


def test_performance_is_counted_as_in_the_literature() -> None:
    """4 B H Lq Lk D forward, 10 backward."""
    problem = Problem(2, 3, 5, 6, 7)
    pairs = 2 * 3 * 5 * 6 * 7
    assert problem.work(cases.forward).flops == 4 * pairs
    assert problem.work(cases.backward).flops == 10 * pairs


def test_operations_of_a_step_agree_with_torch() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    sizes = Sizes(2, 3, 5, 6, 7)
    query, key = torch.randn(sizes.query), torch.randn(sizes.key)
    with FlopCounterMode(display=False) as counter:
        torch.matmul(query, key.transpose(-1, -2))
    assert sizes.products(1).flops == counter.get_total_flops()


def test_operations_of_a_layer_agree_with_torch() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    from mha_ext.bench.suite_modules import PlainMultiHeadAttention

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
        {OURS: lambda: (right,), PLAIN: lambda: (right if wrong is None else wrong,)},
    )


def case_of(contest: Contest) -> Case:
    return Case("softmax", "4,16,16", torch.float32, Work(flops=1000), 16, lambda: contest)


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


def test_an_exact_result_of_an_exact_formula_passes() -> None:
    expected, allowed = oracle.error_allowed(lambda x: (x * 0,), (torch.ones(3),), terms=1)
    assert allowed == [0.0]
    assert oracle.judge((torch.zeros(3),), expected, allowed).passed
    assert not oracle.judge((torch.ones(3),), expected, allowed).passed


def test_terms_that_cancel_are_judged_by_their_size() -> None:
    """As the gradient of a bias on the keys: 0 but for rounding, so that its own size says nothing about what is right.
    Here plain torch rounds both terms alike and is exact; a fused multiply-add rounds one of them only."""
    (x,) = cases.random_inputs(torch.float32, (64,))

    def maths(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x * x - x * x,)

    expected, allowed = oracle.error_allowed(maths, (x,), terms=2)
    fma = (x.double() * x.double() - (x * x).double()).float()
    assert fma.count_nonzero() > 0
    assert oracle.judge((fma,), expected, allowed).passed
    assert not oracle.judge((fma + 1e-5,), expected, allowed).passed


@pytest.mark.parametrize("name", [OURS, PLAIN])
def test_a_wrong_contestant_is_never_timed(name: str) -> None:
    calls = {OURS: 0, PLAIN: 0}
    contest = softmax_contest()

    def counted(contestant: str) -> tuple[torch.Tensor]:
        calls[contestant] += 1
        (right,) = contest.contestants[contestant]()
        return (right + (contestant == name),)

    wrong = replace(contest, contestants={contestant: lambda c=contestant: counted(c) for contestant in calls})
    result = run.run_case("test", case_of(wrong), quick=True)
    assert [row.contestant for row in result.wrong] == [name]
    assert calls[name] == 1  # the one that was judged
    assert result.speedup(PLAIN) is None
    assert all((row.timing is None) == (row.contestant == name) for row in result.rows)


def test_a_contestant_with_a_formula_of_its_own_is_judged_by_that() -> None:
    contest = softmax_contest()
    doubled = replace(
        contest,
        contestants={**contest.contestants, "twice": lambda: (2 * contest.contestants[OURS]()[0],)},
        references={"twice": lambda scores: (2 * torch.softmax(scores, -1),)},
    )
    assert all(verdict.passed for verdict in oracle.verdicts(doubled, 16).values())
    swapped = replace(doubled, references={OURS: doubled.references["twice"]})
    assert {name for name, verdict in oracle.verdicts(swapped, 16).items() if not verdict.passed} == {OURS, "twice"}


def test_a_result_of_another_shape_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^the result has shape \(4, 16\), the reference \(4, 16, 16\)$"):
        run.run_case("test", case_of(softmax_contest(wrong=torch.zeros(4, 16))), quick=True)


# Timing


def test_contestants_take_turns() -> None:
    calls: list[str] = []
    budget = Budget(samples=4, seconds=60.0, sample_seconds=0.0)  # one call a sample
    timings = time_interleaved({name: lambda name=name: calls.append(name) for name in "ab"}, budget)
    warm_up, turns = calls[:2], calls[2:]
    assert warm_up == ["a", "b"]
    assert turns == ["a", "b"] * 4
    assert [timing.samples for timing in timings.values()] == [4, 4]


def test_the_clock_ends_a_long_case_but_never_before_the_least_samples() -> None:
    budget = Budget(samples=100, seconds=0.0, sample_seconds=0.0, least_samples=3)
    assert time_interleaved({"a": lambda: None}, budget)["a"].samples == 3


@pytest.mark.parametrize(("sample_seconds", "calls"), [(0.0, 1), (3.0, 4)])
def test_with_a_pause_short_calls_run_untimed_before_each_sample(monkeypatch, sample_seconds, calls) -> None:
    """A clock that only calls move, by a second each: what runs in a sample, and what happens before it."""
    events: list[str] = []
    monkeypatch.setattr("time.perf_counter", lambda: float(events.count("call")))
    monkeypatch.setattr("time.sleep", lambda seconds: events.append("pause"))
    budget = Budget(samples=3, seconds=1e9, sample_seconds=sample_seconds, pause=0.03)
    timing = time_interleaved({"a": lambda: events.append("call")}, budget)["a"]
    assert timing.median == 1.0  # a call takes a second, and only calls are counted
    first = events.index("pause")
    untimed = calls if calls > 1 else 0
    assert events[first:] == (["pause"] + ["call"] * (untimed + calls)) * 3


def test_median_and_spread() -> None:
    assert summary([3.0, 1.0, 100.0, 2.0, 4.0]) == Timing(3.0, 1.0, (4.0 - 2.0) / 3.0, 5)


# Percent of peak


def test_least_time_of_products_and_of_streams() -> None:
    rates = {"fma_f32": 100.0, "dot_bf16": 50.0, "read_bandwidth": 10.0, "write_bandwidth": 20.0}
    product = Work(flops=10**9)
    assert least_seconds(product, "f32", rates) == pytest.approx(0.01)
    assert least_seconds(product, "f16", rates) == pytest.approx(0.01)  # widened to float32
    assert least_seconds(product, "bf16", rates) == pytest.approx(0.01)  # the faster of the two ways
    assert least_seconds(product, "bf16", {**rates, "amx_bf16": 1000.0}) == pytest.approx(0.001)
    assert least_seconds(product, "f64", rates) is None  # not measured, so not claimed
    stream = Work(bytes_read=10**9, bytes_written=10**9)  # 0.1 s of reading and 0.05 s of writing
    assert least_seconds(stream, "f32", rates) == pytest.approx(0.15)
    assert least_seconds(stream, "f32", {}) is None


def test_the_measured_peaks_are_plausible() -> None:
    from mha_ext._load import core

    kinds = core.peak_kinds()
    assert {"read_bandwidth", "write_bandwidth"} <= set(kinds)
    one = {kind: core.measure_peak(kind, 1) for kind in kinds}
    # From a slow core at one operation a cycle to the largest matrix unit: a loop that the compiler had cut short, or
    # one that waited for memory, would lie outside.
    assert all(0.1 < rate < 20_000 for rate in one.values()), one


@pytest.mark.skipif("avx512" not in mha_ext.supported_isas(), reason="has one width of vectors")
def test_peaks_are_those_of_the_level_in_use() -> None:
    from mha_ext._load import core

    before, kinds = mha_ext.isa(), set(core.peak_kinds())
    try:
        mha_ext.set_isa("avx2")
        assert set(core.peak_kinds()) == kinds - {"dot_bf16", "amx_bf16"}
        mha_ext.set_isa("generic")
        assert set(core.peak_kinds()) == {"read_bandwidth", "write_bandwidth"}
    finally:
        mha_ext.set_isa(before)


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
        peaks.measure(Work(flops=1), "f32")
    assert peaks.rates == {"fma_f32": 5.0}  # and no bandwidth: a product does not stream

    Core.rates = iter([7.0])  # one measurement, for two calls
    for _ in range(2):
        peaks.measure(Work(bytes_read=1), "f32")
    assert peaks.rates == {"fma_f32": 5.0, "read_bandwidth": 7.0}
