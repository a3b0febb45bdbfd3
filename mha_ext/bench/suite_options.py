"""Suites `masks`, `dropout`, `memory`: what an option costs, and what it saves.

Most cases also time the same call without the option. The last column of the table is the share of that time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

from .cases import (
    OURS,
    PLAIN,
    SDPA,
    Case,
    Contest,
    Passes,
    Results,
    contest,
    forward,
    random_inputs,
    trained,
    visible_pairs,
)
from .memory import can_measure_memory
from .oracle import SEED
from .problem import Options, Output, Problem, attention_contest, functions, kept_weights, plain_attention

__all__ = ["dropout_cases", "masks_cases", "memory_cases"]

DTYPES = (torch.float32, torch.bfloat16)
P = 0.1  # of dropout
WINDOW = 256

TEXTS = Problem(2, 8, 1024, 1024, 64)
QUICK_TEXTS = Problem(2, 2, 96, 96, 64)
TEXT = Problem(1, 8, 1024, 1024, 64)
BOOK = Problem(1, 1, 8192, 8192, 64)
QUICK_BOOK = Problem(1, 1, 512, 512, 64)


@dataclass(frozen=True)
class Recipe:
    """An option, as a function of the problem; the pairs of query and key it leaves; the call it is compared with."""

    name: str
    options: Callable[[Problem], Options]
    pairs: Callable[[Problem], int] = lambda problem: problem.queries * problem.keys
    without: str = "no mask"


def scattered(problem: Problem) -> Options:
    """One pair in ten hidden, at random: no tile can be skipped, each has to be looked at."""
    generator = torch.Generator().manual_seed(2)
    return Options(mask=torch.rand(problem.queries, problem.keys, generator=generator) > 0.1)


def padding(problem: Problem) -> Options:
    """(B, 1, 1, Lk): the last texts of the batch are five keys shorter, too few to save anything."""
    lengths = [problem.keys - 5 * (entry > 0) for entry in range(problem.batch)]
    return Options(mask=visible_below(torch.tensor(lengths), problem))


def half_lengths(problem: Problem) -> Options:
    lengths = torch.full((problem.batch,), problem.keys // 2)
    return Options(mask=visible_below(lengths, problem), ours={"key_lengths": lengths})


def visible_below(lengths: Tensor, problem: Problem) -> Tensor:
    return (torch.arange(problem.keys) < lengths[:, None])[:, None, None]


def two_documents(problem: Problem) -> Options:
    """Two texts in a row, each blind to the other: half of the tiles are hidden, which the mask has to tell."""
    second = torch.arange(problem.keys) >= problem.keys // 2
    return Options(mask=second[:, None] == second)


def window(problem: Problem) -> Options:
    """The last WINDOW keys up to the query itself."""
    query, key = torch.arange(problem.queries)[:, None], torch.arange(problem.keys)
    mask = (key <= query) & (key > query - WINDOW)
    return Options(mask=mask, ours={"window": (WINDOW - 1, 0)})


def window_pairs(problem: Problem) -> int:
    """All that is causal, but for the pairs that lie WINDOW or more behind."""
    behind = max(problem.queries - WINDOW, 0)
    return visible_pairs(problem.queries, problem.keys, is_causal=True) - behind * (behind + 1) // 2


def half(problem: Problem) -> int:
    return problem.queries * problem.keys // 2


def causal_pairs(problem: Problem) -> int:
    return visible_pairs(problem.queries, problem.keys, is_causal=True)


RECIPES = (
    Recipe("bool mask (Lq, Lk)", scattered),
    Recipe("padding mask (B,1,1,Lk)", padding),
    Recipe("causal", lambda _: Options(is_causal=True), causal_pairs),
    Recipe("key_lengths, half hidden", half_lengths, half),
    Recipe("mask hides half the tiles", two_documents, half),
)
WINDOW_RECIPE = Recipe(f"window of {WINDOW}", window, window_pairs, without="no window")


def masks_cases(quick: bool) -> list[Case]:
    """Masks, bias and strides against the same call without."""
    texts, book = (QUICK_TEXTS, QUICK_BOOK) if quick else (TEXTS, BOOK)
    cases = []
    for dtype in DTYPES:
        cases += [option_case(recipe, texts, dtype) for recipe in RECIPES]
        cases += [
            _case("bias (1,H,Lq,Lk)", texts, dtype, forward, bias_contest),
            _case("bias, with its gradient", texts, dtype, trained, bias_contest),
            _case("strided, (B,L,H,D) views", texts, dtype, forward, strided_contest),
            option_case(WINDOW_RECIPE, book, dtype),
        ]
    return cases


def dropout_cases(quick: bool) -> list[Case]:
    """Dropout against none. Every contestant draws its own mask, so each is judged by its own formula."""
    problem = QUICK_TEXTS if quick else TEXT
    return [
        _case(name, problem, dtype, passes, dropout_contest)
        for dtype in DTYPES
        for name, passes in ((f"p = {P}, forward", forward), (f"p = {P}, forward + backward", trained))
    ]


def memory_cases(quick: bool) -> list[Case]:
    """Forward and backward of one long text; what is judged and warms up is a shorter one."""
    if not can_measure_memory():
        return []
    book, twin, dtype = (QUICK_BOOK if quick else BOOK), QUICK_BOOK, torch.float32
    recipes: tuple[tuple[str, Callable[[Problem], Problem], Maker], ...] = (
        ("dropout", lambda problem: problem, dropout_contest),
        ("bias with its gradient", lambda problem: problem, bias_contest),
        ("padding mask", lambda problem: problem, padding_contest),
        ("Dv = 96", lambda problem: replace(problem, value_dim=96), attention_contest),
    )
    return [
        Case(
            name,
            str(sized(book)),
            dtype,
            sized(book).work(trained),
            sized(twin).longest_sum,
            partial(without_plain, make, sized(twin), dtype),
            partial(without_plain, make, sized(book), dtype),
        )
        for name, sized, make in (recipes[:2] if quick else recipes)  # each starts three processes
    ]


Maker = Callable[[Passes, Problem, torch.dtype], Contest]


def _case(name: str, problem: Problem, dtype: torch.dtype, passes: Passes, make: Maker) -> Case:
    work = problem.work(passes)
    return Case(name, str(problem), dtype, work, problem.longest_sum, partial(make, passes, problem, dtype))


def option_case(recipe: Recipe, problem: Problem, dtype: torch.dtype) -> Case:
    work = problem.work(forward, recipe.pairs(problem))
    return Case(
        recipe.name, str(problem), dtype, work, problem.longest_sum, partial(option_contest, recipe, problem, dtype)
    )


def option_contest(recipe: Recipe, problem: Problem, dtype: torch.dtype) -> Contest:
    calls, without = functions(problem, recipe.options(problem)), functions(problem)
    return contest(
        forward,
        problem.inputs(dtype, forward),
        calls[PLAIN],
        {**calls, recipe.without: without[OURS]},
        {recipe.without: without[PLAIN]},
    )


def padding_contest(passes: Passes, problem: Problem, dtype: torch.dtype) -> Contest:
    return attention_contest(passes, problem, dtype, padding(problem))


def bias_contest(passes: Passes, problem: Problem, dtype: torch.dtype) -> Contest:
    """A bias is an input, so that the backward passes find its gradient too."""
    calls = functions(problem)
    (bias,) = random_inputs(dtype, (1, problem.heads, problem.queries, problem.keys))
    query, key, value, *gradient = problem.inputs(dtype, passes)

    def without(*inputs: Tensor) -> Tensor:
        return calls[OURS](*inputs[:3])

    def plain_without(*inputs: Tensor) -> Tensor:
        return calls[PLAIN](*inputs[:3])

    if passes is not forward:  # without its bias, the call has other gradients to find
        return contest(passes, [query, key, value, bias, *gradient], calls[PLAIN], calls)
    return contest(
        passes,
        [query, key, value, bias],
        calls[PLAIN],
        {**calls, "no bias": without},
        {"no bias": plain_without},
    )


def strided_contest(passes: Passes, problem: Problem, dtype: torch.dtype) -> Contest:
    """(B, L, H, D) tensors, as a projection makes them, seen as (B, H, L, D)."""
    calls = functions(problem)
    shapes = [(b, length, h, d) for b, h, length, d in (problem.query, problem.key, problem.value)]
    views = [x.transpose(-2, -3) for x in random_inputs(dtype, *shapes)]
    contiguous = [x.contiguous() for x in views]
    return contest(passes, views, calls[PLAIN], {**calls, "contiguous": lambda *_: calls[OURS](*contiguous)})


def dropout_contest(passes: Passes, problem: Problem, dtype: torch.dtype) -> Contest:
    calls, without = functions(problem, Options(dropout=P)), functions(problem)
    references = {name: dropped(problem, call) for name, call in calls.items()}
    return contest(
        passes,
        problem.inputs(dtype, passes),
        without[PLAIN],
        {**calls, "no dropout": without[OURS]},
        references,
    )


def dropped(problem: Problem, call: Output) -> Output:
    """The formula of a contestant with dropout: with the weights that it keeps when the judge has set the seed.

    Raises ValueError, at its first call, when these are not a share of 1 - P of all.
    """

    @cache  # to find the weights takes longer than a call, and not everyone who makes the contest judges it
    def plain() -> Callable[..., Results]:
        kept = kept_weights(problem, call, SEED)
        share, deviation = kept.double().mean().item(), math.sqrt(P * (1 - P) / kept.numel())
        if abs(share - (1 - P)) > 6 * deviation:  # one honest generator in a billion lies that far off
            raise ValueError(f"dropout with p = {P} keeps {share:.3f} of the weights")
        return plain_attention(problem, drop=lambda weights: weights * kept / (1 - P))

    return lambda *inputs: plain()(*inputs)[0]


def without_plain(make: Maker, problem: Problem, dtype: torch.dtype) -> Contest:
    """Plain torch holds the Lq x Lk matrix several times: nothing to measure."""
    made = make(trained, problem, dtype)
    return replace(made, contestants={name: made.contestants[name] for name in (OURS, SDPA)})
