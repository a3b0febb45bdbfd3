"""Judges and times the models: forward, forward with the weights, and training."""

from __future__ import annotations

import copy
import importlib.metadata
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import nn

import mha_ext
from mha_ext.bench.cases import OURS, Results, Work, short_name
from mha_ext.bench.machine import describe
from mha_ext.bench.records import Result, Row, Run
from mha_ext.bench.run import Keep, Progress
from mha_ext.bench.timing import QUICK, Budget, time_interleaved

from .model import Call, Inputs, Library, Model

__all__ = ["PASSES", "distance", "measure", "run_case"]

SUITE = "models"
FULL = Budget(samples=9, seconds=3)


def forward(model: Model, implementation: str, module: nn.Module) -> Call:
    return torch.no_grad()(lambda inputs: (model.forward(module, inputs),))


def attentions(model: Model, implementation: str, module: nn.Module) -> Call | None:
    """The output and what the implementation gives of the weights of every layer."""
    run = model.attentions(implementation, module)
    return run and torch.no_grad()(run)


def training(model: Model, implementation: str, module: nn.Module) -> Call:
    """The gradients of all parameters, by forward and backward; one that is not finite or missing shows as wrong."""

    def run(inputs: Inputs) -> Results:
        module.zero_grad()
        model.forward(module, inputs).double().square().mean().backward()
        return tuple(parameter.grad for parameter in module.parameters() if parameter.grad is not None)

    return run


PASSES: dict[str, Callable[[Model, str, nn.Module], Call | None]] = {
    "forward": forward,
    "attentions": attentions,
    "training": training,
}


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}


def distance(results: Results, exact: Results) -> float:
    """The largest, in units of the largest number of all results: some, such as the gradients of biases of keys, are
    zero but for rounding. Infinite where a result is missing or NaN."""
    if len(results) != len(exact):
        return math.inf
    errors = [(got.double() - want).abs().max().item() for got, want in zip(results, exact, strict=True)]
    size = max(want.abs().max().item() for want in exact)
    return math.inf if any(math.isnan(error) for error in errors) else max(errors) / size


def run_case(model: Model, kind: str, dtype: torch.dtype, budget: Budget) -> Result | None:
    """Judge and time one case: whoever is more than twice as far from float64 as the library's own code of the same
    dtype is wrong, and not timed. There is dropout in the times of training only. None if nobody does this."""
    modules, inputs = model.implementations(dtype), cast(model.inputs(), dtype)
    own = next(iter(modules))
    exact_call = PASSES[kind](model, own, copy.deepcopy(modules[own]).double())
    if exact_call is None:
        return None
    exact = exact_call(cast(inputs, torch.float64))
    calls = {name: call for name, module in modules.items() if (call := PASSES[kind](model, name, module))}
    errors = {name: distance(call(inputs), exact) for name, call in calls.items()}
    allowed = 2 * errors[own] + torch.finfo(dtype).eps
    del exact, exact_call
    for module in modules.values():
        module.train(kind == "training")
    right = {name: partial(call, inputs) for name, call in calls.items() if errors[name] <= allowed}
    times = time_interleaved(right, budget)
    rows = [Row(name, error, allowed, times.get(name)) for name, error in errors.items()]
    return Result(SUITE, f"{model.name}, {kind}", str(model), short_name(dtype), Work(), rows)


def measure(
    cases: Sequence[tuple[Model, str, torch.dtype]],
    libraries: Iterable[Library],
    quick: bool,
    threads: int,
    progress: Progress,
    keep: Keep,
) -> Run:
    """Run the cases, of models of these libraries, whose versions `machine` of the result has. After each case `keep`
    gets the run as far as it is."""
    run = Run(describe(threads), quick)
    versions = {way: importlib.metadata.version(library.package) for library in libraries for way in library.ways}
    run.machine["libraries"] = {OURS: mha_ext.__version__, **versions}
    for model, kind, dtype in cases:
        progress(f"{model.name}, {kind}, {short_name(dtype)}", 1)
        result = run_case(model, kind, dtype, QUICK if quick else FULL)
        if result is not None:
            run.results.append(result)
            keep(run)
    return run
