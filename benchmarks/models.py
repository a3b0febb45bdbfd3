"""Whole models of the transformers library, with its eager attention, torch's fused one and ours.

`python -m benchmarks.models`; benchmarks/README.md says what is timed and how to read it. The models have the sizes of
well-known ones and random parameters: those make no difference to the time.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn

import mha_ext
from mha_ext.bench.cases import OURS, Results, Work, short_name
from mha_ext.bench.machine import describe
from mha_ext.bench.records import Result, Row, Run
from mha_ext.bench.report import describe_run
from mha_ext.bench.run import Progress
from mha_ext.bench.timing import QUICK, Budget, time_interleaved
from mha_ext.cli import BENCH_THREADS, WIDTH_IN_FILES, check_outputs, progress_bar, thread_count
from mha_ext.integrations.transformers import register

from .peers.report import result_table

try:
    from transformers import AutoModel, BertConfig, PretrainedConfig, ViTConfig
except ImportError as missing:
    sys.exit(f"{missing}; this needs: pip install 'mha_ext[transformers]'")

__all__ = ["main"]

SUITE = "models"
EAGER = "HF eager"
IMPLEMENTATIONS = {OURS: "mha_ext", EAGER: "eager", "HF sdpa": "sdpa"}
DTYPES = {short_name(dtype): dtype for dtype in (torch.float32, torch.bfloat16)}
FULL = Budget(samples=9, seconds=3)


@dataclass(frozen=True)
class Size:
    """A model and its input: `length` tokens, or one picture of as many patches and a class token."""

    name: str
    batch: int
    length: int
    config: PretrainedConfig

    def __str__(self) -> str:
        heads, layers = self.config.num_attention_heads, self.config.num_hidden_layers
        return f"{self.batch},{self.length}, {layers} layers of {heads} heads"

    def inputs(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1)
        if isinstance(self.config, ViTConfig):
            side = self.config.image_size
            return {"pixel_values": torch.randn(self.batch, 3, side, side, generator=generator)}
        shape, words = (self.batch, self.length), self.config.vocab_size
        return {"input_ids": torch.randint(words, shape, generator=generator)}


MINILM = dict(num_hidden_layers=6, hidden_size=384, intermediate_size=1536)
SIZES = (
    Size("BERT base", 4, 128, BertConfig()),
    Size("BERT base", 2, 512, BertConfig()),
    Size("MiniLM", 16, 128, BertConfig(**MINILM)),
    Size("ViT-B/16", 4, 197, ViTConfig()),
)
LEGEND = """\
Time of the library's other implementations over that with mha_ext: above 1, mha_ext is faster. Empty: sdpa returns no
attentions. spread: quartile distance over median of whoever is the most restless, ! above 10 %: a busy machine."""
SMALL = dict(num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2)
QUICK_SIZES = (
    Size("tiny BERT", 2, 9, BertConfig(**SMALL)),
    Size("tiny ViT", 2, 5, ViTConfig(**SMALL, image_size=32)),
)


def forward(model: nn.Module, inputs: Mapping[str, Tensor]) -> Results:
    with torch.no_grad():
        return (model(**inputs).last_hidden_state,)


def with_attentions(model: nn.Module, inputs: Mapping[str, Tensor]) -> Results:
    """The attentions of every layer, too."""
    with torch.no_grad():
        out = model(**inputs, output_attentions=True)
    return out.last_hidden_state, *out.attentions


def gradients(model: nn.Module, inputs: Mapping[str, Tensor]) -> Results:
    """Of all parameters, by forward and backward; those that are not finite or not used would show as wrong."""
    model.zero_grad()
    model(**inputs).last_hidden_state.float().square().mean().backward()
    return tuple(parameter.grad for parameter in model.parameters() if parameter.grad is not None)


# In training there is dropout, which is left out where results are compared.
PASSES: dict[str, Callable[[nn.Module, Mapping[str, Tensor]], Results]] = {
    "forward": forward,
    "attentions": with_attentions,
    "training": gradients,
}


def models_of(size: Size, dtype: torch.dtype) -> dict[str, nn.Module]:
    """The same parameters in every implementation."""
    torch.manual_seed(1)
    model = AutoModel.from_config(copy.deepcopy(size.config)).to(dtype).eval()
    models = {name: copy.deepcopy(model) for name in IMPLEMENTATIONS}
    for name, implementation in IMPLEMENTATIONS.items():
        models[name].set_attn_implementation(implementation)
    return models


def exactly(run: Callable[..., Results], models: Mapping[str, nn.Module], inputs: Mapping[str, Tensor]) -> Results:
    """The results in float64, of the library's own code."""
    exact = copy.deepcopy(models[EAGER]).double()
    return run(exact, {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()})


def distance(results: Results, exact: Results) -> float:
    """The largest, in units of the largest number of all results: some, such as the gradients of biases of keys, are
    zero but for rounding. Infinite where a result is missing or NaN."""
    if len(results) != len(exact):
        return math.inf
    errors = [(got.double() - want).abs().max().item() for got, want in zip(results, exact, strict=True)]
    size = max(want.abs().max().item() for want in exact)
    return math.inf if any(math.isnan(error) for error in errors) else max(errors) / size


def run_case(size: Size, kind: str, dtype: torch.dtype, budget: Budget) -> Result:
    """Judge and time one case: whoever is more than twice as far from float64 as the library's eager code of the same
    dtype is wrong, and not timed."""
    models, run = models_of(size, dtype), PASSES[kind]
    if kind == "attentions":
        del models["HF sdpa"]  # it returns none
    inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in size.inputs().items()}
    exact = exactly(run, models, inputs)
    errors = {name: distance(run(model, inputs), exact) for name, model in models.items()}
    allowed = 2 * errors[EAGER] + torch.finfo(dtype).eps
    del exact
    for model in models.values():
        model.train(kind == "training")
    right = {name: partial(run, model, inputs) for name, model in models.items() if errors[name] <= allowed}
    times = time_interleaved(right, budget)
    rows = [Row(name, error, allowed, times.get(name)) for name, error in errors.items()]
    return Result(SUITE, f"{size.name}, {kind}", str(size), short_name(dtype), Work(), rows)


def measure(cases: Sequence[tuple[Size, str, torch.dtype]], quick: bool, threads: int, progress: Progress) -> Run:
    run = Run(describe(threads), quick)
    version = importlib.metadata.version("transformers")
    run.machine |= {"libraries": {OURS: mha_ext.__version__, **dict.fromkeys([*IMPLEMENTATIONS][1:], version)}}
    for size, kind, dtype in cases:
        progress(f"{size.name}, {kind}, {short_name(dtype)}", 1)
        run.results.append(run_case(size, kind, dtype, QUICK if quick else FULL))
    return run


def cases_of(options: argparse.Namespace) -> Iterator[tuple[Size, str, torch.dtype]]:
    for dtype in options.dtype:
        for size in QUICK_SIZES if options.quick else SIZES:
            for kind in options.cases:
                yield size, kind, DTYPES[dtype]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status, 1 if a result was wrong; wrong arguments raise SystemExit(2)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=PASSES, default=[*PASSES], help="what to time (default: all)")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=[*DTYPES], help="dtypes (default: all)")
    parser.add_argument("--threads", type=thread_count, metavar="N", default=BENCH_THREADS, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="tiny models, few samples: does it all run?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, versions and all figures")
    parser.set_defaults(plot=None)
    options = parser.parse_args(argv)
    check_outputs(options, parser)
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH_IN_FILES
    torch.set_num_threads(options.threads)
    register()
    cases = [*cases_of(options)]
    with progress_bar(len(cases), console) as progress:
        run = measure(cases, options.quick, options.threads, progress)
    if options.json:
        run.save(options.json)
    console.print(describe_run(run), highlight=False)
    for dtype in options.dtype:
        console.print(result_table(run, dtype))
    console.print(LEGEND, highlight=False)
    return 1 if any(result.wrong for result in run.results) else 0


if __name__ == "__main__":
    sys.exit(main())
