"""``mha-ext demo``: the course's example run natively, checked, and timed. Every verdict is computed on the spot."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError, gradcheck

from . import MultiHeadAttention, SelfAttention, attention, attention_scores, masked_softmax, weighted_sum
from .bench.cases import OURS, PLAIN, SDPA, Case
from .bench.oracle import error_allowed, judge
from .bench.problem import Problem
from .bench.records import Result, Run
from .bench.report import doubts, format_seconds
from .bench.suite_attention import attention_cases
from .bench.suite_modules import PlainMultiHeadAttention

__all__ = ["demo"]

BATCH, LENGTH, WIDTH, HEADS, DROPOUT = 2, 4, 512, 8, 0.1
TIMED = Problem(1, 12, 512, 512, 64)  # one text through a layer of BERT base

RunCases = Callable[[Sequence[tuple[str, Case]]], Run]


@dataclass(frozen=True)
class Check:
    """One thing that was verified, and how it came out."""

    name: str
    passed: bool
    detail: str


def demo(console: Console, run_cases: RunCases) -> bool:
    """Print the demonstration; True if every check passed."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, BATCH, LENGTH, WIDTH)
    mask = torch.tril(torch.ones(LENGTH, LENGTH))  # no look ahead
    console.print(
        f"query, key, value: ({BATCH}, {LENGTH}, {WIDTH}), that is batch, length, width; mask = torch.tril(ones)"
    )
    checks = [
        show_steps(console, query, key, value, mask),
        check_self_attention(query, key, value, mask),
        check_multi_head_attention(query, key, value),
        check_gradients(),
    ]
    console.print("\nAgainst PyTorch on this machine, through the public functions:")
    run = run_cases(
        [("demo", case) for dtype in (torch.float32, torch.bfloat16) for case in attention_cases(TIMED, dtype)]
    )
    console.print(speed_table(run.results))
    console.print(doubts(run.machine["load_average"]), end="", highlight=False)
    checks += [check_before_timing(result) for result in run.results]
    console.print(check_table(checks))
    return all(check.passed for check in checks)


def plain_attention(mask: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The three steps as the textbook writes them; in float64 they are what the kernels are measured by."""
    scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(query.shape[-1])
    weights = torch.softmax(scores.masked_fill(mask == 0, -math.inf), -1)
    return torch.matmul(weights, value), weights


def against_float64(
    name: str, results: tuple[Tensor, ...], reference: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]
) -> Check:
    """Compare with the reference in float64; what rounding may cost is computed from the inputs (bench/oracle.py)."""
    expected, allowed = error_allowed(reference, inputs, terms=WIDTH)
    verdict = judge(results, expected, allowed)
    return Check(
        name,
        verdict.passed,
        f"largest error against float64 {verdict.error:.2g}, rounding may cost {verdict.allowed:.2g}",
    )


def show_steps(console: Console, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Check:
    """Run the three native steps one after the other and print what each makes of its input."""
    scores = attention_scores(query, key)
    weights = masked_softmax(scores, mask)
    output = weighted_sum(weights, value)
    table = Table(title="\nThe three steps", title_justify="left")
    for column in ("step", "formula", "in", "out"):
        table.add_column(column)
    rows = (
        ("attention_scores(query, key)", "Q Kᵀ / √D", query, scores),
        ("masked_softmax(scores, mask)", "softmax over the keys that the mask lets through", scores, weights),
        ("weighted_sum(weights, value)", "P V", weights, output),
    )
    for step, formula, before, after in rows:
        table.add_row(step, formula, str(tuple(before.shape)), str(tuple(after.shape)))
    console.print(table)
    console.print("weights of the first batch entry: each row sums to 1, nothing above the diagonal")
    for row in weights[0].tolist():
        console.print("  " + "  ".join(f"{weight:.3f}" for weight in row), highlight=False)
    return against_float64("the three steps", (output, weights), partial(plain_attention, mask), (query, key, value))


def check_self_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Check:
    module = SelfAttention(DROPOUT).eval()  # dropout acts in training only
    return against_float64(
        f"SelfAttention({DROPOUT})",
        module(query, key, value, mask),
        partial(plain_attention, mask),
        (query, key, value),
    )


def check_multi_head_attention(query: Tensor, key: Tensor, value: Tensor) -> Check:
    module = MultiHeadAttention(WIDTH, HEADS).eval()
    plain = PlainMultiHeadAttention(WIDTH, HEADS, fused=False).double()
    names = [name for name, _ in module.named_parameters()]
    parameters = [parameter.detach() for parameter in module.parameters()]

    def reference(query: Tensor, key: Tensor, value: Tensor, *exact: Tensor) -> tuple[Tensor, Tensor]:
        state = dict(zip(names, exact, strict=True))
        output, weights = torch.func.functional_call(plain, state, (query, key, value))
        return output, weights

    with torch.no_grad():
        results = module(query, key, value)
        check = against_float64(
            f"MultiHeadAttention({WIDTH}, {HEADS})", results, reference, (query, key, value, *parameters)
        )
    shapes = " and ".join(str(tuple(result.shape)) for result in results)
    return Check(check.name, check.passed, f"{shapes}; {check.detail}")


def check_gradients() -> Check:
    """Numerical against native gradients, of output and weights, in float64."""
    inputs = [torch.randn(BATCH, HEADS, LENGTH, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    name, method = "gradients of attention", "torch.autograd.gradcheck"
    try:
        gradcheck(partial(attention, is_causal=True), inputs)
    except GradcheckError as error:
        return Check(name, False, f"{method}: {error}")
    return Check(name, True, f"{method} agrees, causal, for query, key and value, through output and weights")


def check_before_timing(result: Result) -> Check:
    worst = max(result.rows, key=lambda row: row.error / row.error_allowed)
    detail = f"largest error {worst.error:.2g} ({worst.contestant}), rounding may cost {worst.error_allowed:.2g}"
    return Check(f"{result.name}, {result.dtype}", not result.wrong, detail)


def speed_table(results: Sequence[Result]) -> Table:
    table = Table()
    for name in ("case", "dtype", "mha_ext", "PyTorch", "mha_ext is"):
        table.add_column(name, justify="left" if name in ("case", "dtype") else "right")
    for result in results:
        times = result.times
        ratios = {name: ratio for name in (SDPA, PLAIN) if (ratio := result.speedup(name)) is not None}
        table.add_row(
            f"{result.name} ({result.shape})",
            result.dtype,
            format_seconds(times[OURS]) if OURS in times else "wrong",
            "\n".join(f"{name} {format_seconds(times[name])}" for name in ratios),
            "\n".join(f"{ratio:.2f}x as fast" for ratio in ratios.values()),
        )
        table.add_section()
    return table


def check_table(checks: Sequence[Check]) -> Table:
    table = Table(title="\nChecks", title_justify="left")
    for name in ("verdict", "what", "how"):
        table.add_column(name)
    for check in checks:
        verdict = Text("right", style="green") if check.passed else Text("WRONG", style="bold red")
        table.add_row(verdict, check.name, check.detail)
    return table
