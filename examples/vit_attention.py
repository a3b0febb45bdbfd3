"""Put mha_ext's attention into a ViT of the library timm, compare, time, and draw where its class token looks.

    pip install 'mha_ext[examples,timm]'            # timm needs torchvision, which goes with one torch: see README.md
    python examples/vit_attention.py                # writes vit_attention.png

`mha_ext.swap_attention` replaces timm's attention in a copy of the model. Printed are how far both are from timm's
output in float64, and their times: forward, forward and backward, and forward with the attention weights of every
layer, for which timm has to leave its fused attention.

Nothing is downloaded: the picture comes with scikit-image, and the weights of the model are random unless `--weights`
names a checkpoint of timm. Random weights are as fast as trained ones, but what they look at means nothing.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import mha_ext
from mha_ext.bench.report import doubts, format_seconds
from mha_ext.bench.timing import Budget, time_interleaved

try:
    import skimage.data
    import timm
    from matplotlib.figure import Figure
    from timm.utils import AttentionExtract

    from mha_ext.integrations.timm import attention_weights
except ImportError as missing:
    sys.exit(f"{missing}; this example needs: pip install 'mha_ext[examples,timm]'")

PICTURES = ("astronaut", "chelsea", "coffee", "rocket")
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Pair:
    """A model as timm computes it, and its copy with mha_ext's attention."""

    timm: nn.Module
    ours: nn.Module

    def to(self, dtype: torch.dtype) -> Pair:
        return Pair(copy.deepcopy(self.timm).to(dtype), copy.deepcopy(self.ours).to(dtype))


def load(name: str, weights: Path | None, console: Console) -> Pair:
    if not timm.is_model(name):
        sys.exit(f"--model must be a model of timm, got {name!r}")
    model = timm.create_model(name, checkpoint_path=str(weights) if weights else "").eval()
    if not getattr(model, "has_class_token", False):
        sys.exit(f"--model must be a ViT with a class token, got {name!r}")
    swapped = copy.deepcopy(model)
    console.print(f"{name}: {mha_ext.swap_attention(swapped)}")
    return Pair(model, swapped)


def sample(name: str, model: nn.Module) -> tuple[Tensor, Tensor]:
    """A square of the picture, (3, S, S) in [0, 1], and the same as the model wants it."""
    config = timm.data.resolve_model_data_config(model)
    pixels = torch.tensor(getattr(skimage.data, name)(), dtype=torch.float32).movedim(-1, 0) / 255
    side = min(pixels.shape[1:])
    top, left = ((length - side) // 2 for length in pixels.shape[1:])
    square = pixels[:, top : top + side, left : left + side]
    shown = nn.functional.interpolate(square[None], config["input_size"][1:], mode="bilinear", antialias=True)[0]
    mean, std = (torch.tensor(config[statistic]).view(3, 1, 1) for statistic in ("mean", "std"))
    return shown, (shown - mean) / std


@torch.no_grad()
def compare(models: Pair, batch: Tensor, console: Console) -> bool:
    """Whether mha_ext's output is at most twice as far from timm's in float64 as timm's own of the same dtype."""
    exact = models.to(torch.float64).timm(batch.double())
    table = Table("dtype", "timm", "mha_ext", title="Distance from float64")
    all_near = True
    for dtype in DTYPES:
        pair = models.to(dtype)
        theirs, ours = (
            (model(batch.to(dtype)).double() - exact).abs().max().item() for model in (pair.timm, pair.ours)
        )
        near = ours <= 2 * theirs + torch.finfo(dtype).eps * exact.abs().max().item()
        all_near = all_near and near
        table.add_row(str(dtype).removeprefix("torch."), f"{theirs:.1e}", f"{ours:.1e}" + ("" if near else " [red]far"))
    console.print(table)
    return all_near


def forward(model: nn.Module, batch: Tensor) -> Callable[[], object]:
    return torch.no_grad()(lambda: model(batch))


def forward_backward(model: nn.Module, batch: Tensor) -> Callable[[], object]:
    def run() -> None:
        model.zero_grad()
        model(batch).float().square().mean().backward()

    return run


def timm_weights(model: nn.Module, batch: Tensor) -> Callable[[], dict[str, Tensor]]:
    """timm's way to the weights: every module off its fused path, and hooks where the weights pass."""
    unfused = copy.deepcopy(model)
    for module in unfused.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    extract = AttentionExtract(unfused, method="hook")
    return torch.no_grad()(lambda: extract(batch))


def our_weights(model: nn.Module, batch: Tensor) -> Callable[[], dict[str, Tensor]]:
    def run() -> dict[str, Tensor]:
        with torch.no_grad(), attention_weights(model) as weights:
            model(batch)
        return weights

    return run


def time_all(models: Pair, batch: Tensor, budget: Budget, console: Console) -> None:
    table = Table("dtype", "pass", "timm", "mha_ext", "timm / mha_ext")
    table.title = f"{len(batch)} pictures, {torch.get_num_threads()} threads: medians of interleaved runs"
    for dtype in DTYPES:
        pair, inputs = models.to(dtype), batch.to(dtype)
        for what, theirs, ours in (
            ("forward", forward(pair.timm, inputs), forward(pair.ours, inputs)),
            ("forward and backward", forward_backward(pair.timm, inputs), forward_backward(pair.ours, inputs)),
            ("forward, with weights", timm_weights(pair.timm, inputs), our_weights(pair.ours, inputs)),
        ):
            with console.status(f"timing {what} in {dtype}"):
                times = time_interleaved({"timm": theirs, "mha_ext": ours}, budget)
            before, after = times["timm"].median, times["mha_ext"].median
            table.add_row(str(dtype).removeprefix("torch."), what, format_seconds(before), format_seconds(after),
                          f"{before / after:.2f}")  # fmt: skip
    console.print(table)


def rollout(weights: list[Tensor]) -> Tensor:
    """How much each token reaches each other through all layers, (L, L), where half of every layer is its residual.

    Abnar and Zuidema, Quantifying attention flow in transformers, ACL 2020.
    """
    reach = torch.eye(weights[0].shape[-1])
    for layer in weights:
        reach = (layer.mean(0) + torch.eye(layer.shape[-1])) / 2 @ reach
    return reach


def draw(model: nn.Module, shown: Tensor, prepared: Tensor, title: str, path: Path) -> None:
    """What the class token looks at: through all layers, and by each head of the last one."""
    weights = [layer[0] for layer in our_weights(model, prepared[None])().values()]
    maps = {"all layers (rollout)": rollout(weights)[0]}
    maps |= {f"last layer, head {head + 1}": look[0] for head, look in enumerate(weights[-1])}
    columns = 4
    rows = -(-(1 + len(maps)) // columns)
    figure = Figure(figsize=(2.6 * columns, 2.4 * rows + 0.6), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    axes[0].imshow(shown.movedim(0, -1))
    axes[0].set_title("picture", fontsize=9)
    grid = model.patch_embed.grid_size
    for axis, (name, look) in zip(axes[1:], maps.items(), strict=False):
        patches = look[model.num_prefix_tokens :].view(grid)
        share = patches / patches.mean()
        axis.imshow(shown.mean(0), cmap="gray", extent=(0, grid[1], grid[0], 0))
        heat = axis.imshow(share, cmap="inferno", alpha=0.7, extent=(0, grid[1], grid[0], 0))
        axis.set_title(name, fontsize=9)
        figure.colorbar(heat, ax=axis, shrink=0.75).ax.tick_params(labelsize=7)
    for axis in axes:
        axis.set_axis_off()
    figure.supxlabel("attention to a patch over the mean of all patches; each map has its own scale", fontsize=9)
    figure.savefig(path, dpi=150)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="vit_small_patch16_224", help="a ViT of timm (vit_small_patch16_224)")
    parser.add_argument("--weights", type=Path, help="a checkpoint of it; random weights without")
    parser.add_argument("--picture", choices=PICTURES, default="chelsea", help="a sample of scikit-image (chelsea)")
    parser.add_argument("--batch-size", type=int, default=2, help="pictures in a batch for the times (2)")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each line of the times, at least (2)")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (0)")
    parser.add_argument("--output", type=Path, default=Path("vit_attention.png"))
    return parser.parse_args()


def main() -> int:
    options = arguments()
    console = Console()
    console.print(doubts(os.getloadavg()[0]), end="", highlight=False)
    torch.manual_seed(options.seed)
    models = load(options.model, options.weights, console)
    shown, prepared = sample(options.picture, models.timm)
    near = compare(models, prepared[None], console)
    time_all(models, prepared.repeat(options.batch_size, 1, 1, 1), Budget(15, options.seconds), console)
    kind = f"weights of {options.weights.name}" if options.weights else "random weights: the maps mean nothing"
    draw(models.ours, shown, prepared, f"Where the class token of {options.model} looks ({kind})", options.output)
    console.print(f"wrote {options.output}")
    if not near:
        console.print("[red]mha_ext's output is too far from timm's[/red]")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
