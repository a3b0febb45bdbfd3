"""Suite `cuda`: attention on a GPU against every backend that scaled_dot_product_attention has there.

Empty where torch sees no GPU or mha_ext was built without CUDA. Contestants run back to back without waiting for each
call, as in a network.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mha_ext._load import why_no_gpu

from .cases import OURS, PLAIN, SDPA, Case, Contest, Function, Passes, Results, backward, forward, visible_pairs
from .problem import Options, Problem, functions, plain_attention

__all__ = ["cuda_cases"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
ROWS = (
    ("long text", Problem(4, 16, 4096, 4096, 128), False),
    ("long text, causal", Problem(4, 16, 4096, 4096, 128), True),
    ("GPT-2, causal", Problem(16, 12, 1024, 1024, 64), True),
    ("BERT base", Problem(32, 12, 512, 512, 64), False),
    ("ViT-B/16", Problem(64, 12, 197, 197, 64), False),
    ("Llama 3.1 8B, causal", Problem(2, 32, 4096, 4096, 128, group=4), True),
)
DECODE = (("one query", Problem(16, 32, 1, 8192, 128, group=4), False),)
WEIGHTS = (("output and weights", Problem(8, 12, 1024, 1024, 64), False),)
QUICK = (("short text, causal", Problem(2, 4, 96, 96, 64), True),)


def cuda_cases(quick: bool) -> list[Case]:
    if why_no_gpu():
        return []
    rows = QUICK if quick else ROWS
    return [
        *(_case(forward, row, dtype) for dtype in DTYPES for row in rows),
        *(_case(backward, row, dtype) for dtype in DTYPES for row in rows),
        *(_case(forward, row, dtype) for dtype in DTYPES[:2] for row in (() if quick else DECODE)),
        *(_weights(row, dtype) for dtype in DTYPES for row in (QUICK if quick else WEIGHTS)),
    ]


def _case(passes: Passes, row: tuple[str, Problem, bool], dtype: torch.dtype) -> Case:
    name, problem, is_causal = row
    work = problem.work(passes, visible_pairs(problem.queries, problem.keys, is_causal))
    make = partial(_contest, passes, problem, dtype, Options(is_causal))
    name = f"{name}, backward" if passes is backward else name
    return Case(name, str(problem), dtype, work, problem.longest_sum, make, device="cuda")


def _weights(row: tuple[str, Problem, bool], dtype: torch.dtype) -> Case:
    name, problem, _ = row
    make = partial(_weights_contest, problem, dtype)
    return Case(name, str(problem), dtype, problem.work(forward), problem.longest_sum, make, device="cuda")


def _contest(passes: Passes, problem: Problem, dtype: torch.dtype, options: Options) -> Contest:
    calls: dict[str, Function] = dict(functions(problem, options))
    of_backend = {f"SDPA {name}": _limited(calls[SDPA], backend) for name, backend in BACKENDS.items()}
    with torch.device("cuda"):  # the mask of the formula
        plain = functions(problem, options)[PLAIN]
    return _on_gpu(passes, problem.inputs(dtype, passes), plain, {**calls, PLAIN: plain, **of_backend})


def _weights_contest(problem: Problem, dtype: torch.dtype) -> Contest:
    import mha_ext

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Results:
        output, weights = mha_ext.attention(query, key, value)
        assert weights is not None  # need_weights is True
        return output, weights

    plain = plain_attention(problem)
    return _on_gpu(forward, problem.inputs(dtype, forward), plain, {OURS: ours, PLAIN: plain})


def _limited(function: Function, backend: SDPBackend) -> Function:
    @functools.wraps(function)
    def call(*inputs: Tensor) -> Tensor | Results:
        with sdpa_kernel(backend):
            return function(*inputs)

    return call


def _on_gpu(passes: Passes, inputs: list[Tensor], reference: Function, calls: dict[str, Function]) -> Contest:
    """Of the contestants those that take the inputs: a backend refuses some dtypes and shapes."""
    there = [x.cuda() for x in inputs]
    contestants: dict[str, Callable[[], Results]] = {}
    for name, call in calls.items():
        try:
            run = passes(call, there)
            run()
        except RuntimeError:
            if name == OURS:
                raise
            continue
        contestants[name] = run
    return Contest(there, lambda *exact: passes(reference, exact)(), contestants)
