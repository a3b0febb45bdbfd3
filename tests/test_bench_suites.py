"""The suites: what they list, what their options hide, how dropout is judged, and how memory is measured."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import mha_ext
from mha_ext.bench import memory, suite_options
from mha_ext.bench.cases import OURS, SDPA, Case, Contest, Work, visible_pairs
from mha_ext.bench.oracle import verdicts
from mha_ext.bench.problem import Options, Problem, functions, kept_weights
from mha_ext.bench.suites import SUITES, listed


@pytest.mark.parametrize("quick", [False, True])
def test_each_case_is_listed_once(quick: bool) -> None:
    names = [(suite, case.name, case.shape, case.dtype) for name in SUITES for suite, case in listed(name, quick)]
    assert max(Counter(names).values()) == 1


def test_a_memory_case_is_found_again_by_its_name() -> None:
    names = [case.name for case in SUITES["memory"].cases(False)]
    assert len(set(names)) == len(names)
    assert {case.name for case in SUITES["memory"].cases(True)} < set(names)


SMALL = Problem(2, 1, 600, 600, 4)


@pytest.mark.parametrize(
    "recipe", [*suite_options.RECIPES, suite_options.WINDOW_RECIPE], ids=lambda recipe: recipe.name
)
def test_visible_pairs_of_an_option_are_those_of_its_mask(recipe: suite_options.Recipe) -> None:
    """Exact where tiles can be skipped; all pairs where the mask only thins them out."""
    options = recipe.options(SMALL)
    if options.is_causal:
        visible = visible_pairs(SMALL.queries, SMALL.keys, is_causal=True)
    else:
        visible = int(options.mask.expand(SMALL.batch, 1, SMALL.queries, SMALL.keys).sum()) // SMALL.batch
    everything = SMALL.queries * SMALL.keys
    thinned = recipe.name.startswith(("bool", "padding"))
    assert recipe.pairs(SMALL) == (everything if thinned else visible)
    assert visible < everything


@pytest.mark.parametrize("name", [OURS, SDPA])
def test_the_weights_that_dropout_keeps_are_found(name: str) -> None:
    problem = Problem(2, 2, 24, 40, 8)
    call = functions(problem, Options(dropout=0.25))[name]
    query, key, value = torch.randn(3, 2, 2, 40, 8).unbind(0)
    torch.manual_seed(3)
    output = call(query[..., :24, :], key, value)
    kept = kept_weights(problem, call, seed=3)
    weights = torch.softmax(query[..., :24, :] @ key.transpose(-1, -2) / 8**0.5, -1) * kept / 0.75
    torch.testing.assert_close(output, weights @ value)


def test_dropout_that_drops_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = mha_ext.attention
    monkeypatch.setattr(mha_ext, "attention", lambda *inputs, dropout, **options: right(*inputs, **options))
    case = SUITES["dropout"].cases(True)[0]
    with pytest.raises(ValueError, match=r"^dropout with p = 0\.1 keeps 1\.000 of the weights$"):
        verdicts(case.prepare(), case.terms)


@pytest.mark.skipif(not memory.can_measure_memory(), reason="reads the memory of a process as Linux does")
def test_extra_memory_is_what_a_call_holds_beyond_its_results() -> None:
    size = 128 * 2**20  # half of it is beyond 32 MiB: smaller blocks may lie in memory that earlier tests have left

    def contest() -> Contest:
        def run() -> tuple[torch.Tensor]:
            held = torch.ones(size, dtype=torch.uint8)
            return (torch.ones(size // 2, dtype=torch.uint8) + held[0],)  # two of that size for a moment

        return Contest((), lambda: (), {OURS: run})

    case = Case("hold", "", torch.float32, Work(), 1, contest, contest)
    extra = memory.extra_bytes(case, OURS)
    # held, and the sum's operand; the sum itself is a result. Everything else of the process moves by far less.
    assert abs(extra - 1.5 * size) < size / 8


def test_a_failing_memory_process_is_an_error() -> None:
    case = Case("none such", "", torch.float32, Work(), 1, lambda: None, lambda: None)
    with pytest.raises(RuntimeError, match="measuring the memory of mha_ext in memory: none such failed"):
        memory.extra_bytes_in_fresh_process("memory", case, OURS, quick=True)
