"""Suites `forward`, `backward`, `weights`, `decode`, `overhead`, `threads`: attention without options.

The sizes are those of layers in use (BERT, ViT, GPT-2, Whisper, Llama), and those that show a weakness: long and short
texts, few heads, wide ones.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

import mha_ext

from .cases import (
    OURS,
    PLAIN,
    Case,
    Contest,
    Passes,
    Results,
    Work,
    backward,
    contest,
    forward,
    trained,
    visible_pairs,
)
from .problem import Options, Problem, attention_contest, functions, plain_attention

__all__ = [
    "attention_cases",
    "backward_cases",
    "decode_cases",
    "forward_cases",
    "overhead_cases",
    "threads_cases",
    "weights_cases",
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

LONG = Problem(1, 12, 2048, 2048, 64)
BERT = Problem(8, 12, 512, 512, 64)
SHORT = Problem(8, 12, 128, 128, 64)
TINY = Problem(2, 1, 4, 4, 64)
QUICK = Problem(2, 4, 96, 96, 64)

Row = tuple[str, Problem, bool]  # name, sizes, is_causal

BOTH_WAYS: tuple[Row, ...] = (
    ("long text", LONG, False),
    ("long text, causal", LONG, True),
    ("BERT base", BERT, False),
    ("ViT-B/16", Problem(32, 12, 197, 197, 64), False),
    ("GPT-2, causal", Problem(1, 12, 1024, 1024, 64), True),
    ("Whisper base encoder", Problem(1, 8, 1500, 1500, 64), False),
    ("Llama 3.2 1B, causal", Problem(1, 32, 512, 512, 64, group=4), True),
)
FORWARD: tuple[Row, ...] = (*BOTH_WAYS, ("wide heads", Problem(1, 8, 2048, 2048, 128), False), ("short", SHORT, False))
BACKWARD: tuple[Row, ...] = (*BOTH_WAYS, ("two heads", Problem(1, 2, 4096, 4096, 64), False))
QUICK_ROWS: tuple[Row, ...] = (("short text", QUICK, False), ("short text, causal", QUICK, True))


def forward_cases(quick: bool) -> list[Case]:
    """The output alone: contestants return no weights."""
    rows = QUICK_ROWS if quick else FORWARD
    cases = [_case(forward, row, dtype) for dtype in DTYPES for row in rows]
    return [*cases, _case(forward, rows[0], torch.float64)]


def backward_cases(quick: bool) -> list[Case]:
    """The gradients alone, after a forward that is not timed."""
    return [_case(backward, row, dtype) for dtype in DTYPES for row in (QUICK_ROWS if quick else BACKWARD)]


def weights_cases(quick: bool) -> list[Case]:
    """Output and weights."""
    rows = QUICK_ROWS[:1] if quick else (FORWARD[0], FORWARD[2], FORWARD[-1])
    return [_weights(row, dtype) for dtype in DTYPES for row in rows]


def attention_cases(problem: Problem, dtype: torch.dtype) -> list[Case]:
    """One problem in the three ways it is used: with the weights, without, and in training."""
    return [
        _weights(("output and weights", problem, False), dtype),
        _case(forward, ("output", problem, False), dtype),
        _case(trained, ("forward + backward", problem, False), dtype),
    ]


def decode_cases(quick: bool) -> list[Case]:
    """One query against the keys and values of a cache, which have to be read once."""
    problems = [Problem(8, 12, 1, keys, 64) for keys in ((256,) if quick else (2048, 8192))]
    return [
        Case(
            "one query",
            str(problem),
            dtype,
            Work(bytes_read=sum(_bytes(shape, dtype) for shape in (problem.key, problem.value))),
            problem.longest_sum,
            partial(attention_contest, forward, problem, dtype),
        )
        for dtype in DTYPES
        for problem in problems
    ]


def overhead_cases(quick: bool) -> list[Case]:
    """Almost nothing to compute: what a call costs by itself."""
    return [
        _case(forward, ("no gradient", TINY, False), torch.float32),
        _case(trained, ("forward + backward", TINY, False), torch.float32),
    ]


def threads_cases(quick: bool) -> list[Case]:
    """All threads against one."""
    problem = QUICK if quick else LONG
    return [
        replace(_case(passes, (name, problem, False), dtype), prepare=partial(threads_contest, passes, problem, dtype))
        for dtype in DTYPES[:2]
        for name, passes in (("forward", forward), ("backward", backward))
    ]


def _case(passes: Passes, row: Row, dtype: torch.dtype) -> Case:
    name, problem, is_causal = row
    work = problem.work(passes, visible_pairs(problem.queries, problem.keys, is_causal))
    make = partial(attention_contest, passes, problem, dtype, Options(is_causal))
    return Case(name, str(problem), dtype, work, problem.longest_sum, make)


def _weights(row: Row, dtype: torch.dtype) -> Case:
    name, problem, _ = row
    make = partial(weights_contest, problem, dtype)
    return Case(name, str(problem), dtype, problem.work(forward), problem.longest_sum, make)


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def weights_contest(problem: Problem, dtype: torch.dtype) -> Contest:
    """Against plain torch, which has the weights as well, and against ourselves without them."""
    plain = plain_attention(problem)
    alone = functions(problem)

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Results:
        output, weights = mha_ext.attention(query, key, value)
        assert weights is not None  # need_weights is True
        return output, weights

    without = "no weights"
    return contest(
        forward,
        problem.inputs(dtype, forward),
        plain,
        {OURS: ours, PLAIN: plain, without: alone[OURS]},
        {without: alone[PLAIN]},
    )


def threads_contest(passes: Passes, problem: Problem, dtype: torch.dtype) -> Contest:
    threads = torch.get_num_threads()
    made = attention_contest(passes, problem, dtype)
    ours = made.contestants[OURS]

    def on_one_thread() -> Results:
        torch.set_num_threads(1)
        try:
            return ours()
        finally:
            torch.set_num_threads(threads)

    return replace(made, contestants={OURS: ours, "one thread": on_one_thread})
