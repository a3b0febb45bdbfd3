"""Train a small Transformer encoder built from mha_ext.MultiHeadAttention to read handwritten digits.

    pip install 'mha_ext[examples]'                 # or only matplotlib and scikit-learn
    python examples/digits.py                       # about a minute on two cores; writes digits_attention.png

The data are the 1797 scans of 8x8 pixels that come with scikit-learn (`sklearn.datasets.load_digits`), so nothing
is downloaded. Every pixel becomes one token (its 3x3 neighbourhood, embedded, plus a learned position); a [class]
token in front of the 64 pixel tokens gathers the answer. The picture shows where the [class] token looks, head by
head, in the last layer.

The test set is split off before anything else and read once, after training. To try other settings, judge them on a
part of the training set instead: `--evaluate-on validation`.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

import mha_ext

try:
    import matplotlib

    matplotlib.use("Agg")  # a picture on disk, no window
    import matplotlib.pyplot as plt
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import PercentFormatter
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
except ImportError as missing:
    sys.exit(f"{missing}; this example needs: pip install 'mha_ext[examples]'")

GRID = 8  # the scans are 8x8 pixels
CLASSES = 10
# From transparent to dark red: the digit shows through where no head looks.
HEAT = LinearSegmentedColormap.from_list(
    "heat", [(1, 0.75, 0, 0), (1, 0.55, 0, 0.8), (0.85, 0.1, 0.1, 0.9), (0.45, 0, 0.15, 1)]
)
TEST_SHARE = 0.25  # 450 of the 1797 scans
VALIDATION_SHARE = 0.2  # of the training scans, and only with --evaluate-on validation
SPLIT_SEED = 0  # one split for every run: --seed changes the training, never which scans are held out


@dataclass(frozen=True)
class Scans:
    """Images (N, 8, 8), float32 in [0, 1], and their labels (N,), int64."""

    images: Tensor
    labels: Tensor


def split(scans: Scans, share: float) -> tuple[Scans, Scans]:
    """Set `share` of the scans apart, with the same mix of digits in both parts."""
    kept, apart = train_test_split(
        range(len(scans.labels)), test_size=share, random_state=SPLIT_SEED, stratify=scans.labels
    )
    return Scans(scans.images[kept], scans.labels[kept]), Scans(scans.images[apart], scans.labels[apart])


def load(evaluate_on: str) -> tuple[Scans, Scans]:
    """The scans to train on and those to be judged by; with "validation" the test scans stay untouched."""
    digits = load_digits()
    everything = Scans(torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target))
    training, test = split(everything, TEST_SHARE)
    return (training, test) if evaluate_on == "test" else split(training, VALIDATION_SHARE)


class EncoderBlock(nn.Module):
    """LayerNorm(x + attention), as MultiHeadAttention computes it, then LayerNorm(x + MLP)."""

    def __init__(self, d_model: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = mha_ext.MultiHeadAttention(d_model, n_heads, dropout)
        self.mlp = nn.Sequential(
            nn.Linear(d_model, 2 * d_model), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * d_model, d_model)
        )
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, L, d_model) -> the same shape, and the attention weights (B, n_heads, L, L)."""
        attended, weights = self.attention(x, x, x)
        return self.norm(attended + self.mlp(attended)), weights


class DigitEncoder(nn.Module):
    """Images (B, 8, 8) -> logits (B, 10) and, per layer, attention weights (B, n_heads, 65, 65)."""

    def __init__(self, d_model: int, n_heads: int, n_layers: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, d_model, kernel_size=3, padding=1)
        self.class_token = nn.Parameter(torch.zeros(1, 1, d_model))
        self.position = nn.Parameter(torch.randn(1, 1 + GRID * GRID, d_model) / math.sqrt(d_model))
        self.blocks = nn.ModuleList(EncoderBlock(d_model, n_heads, dropout) for _ in range(n_layers))
        self.classify = nn.Linear(d_model, CLASSES)

    def forward(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        pixels = self.embed(images.unsqueeze(1)).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(images), -1, -1), pixels], dim=1) + self.position
        weights = []
        for block in self.blocks:
            x, layer_weights = block(x)
            weights.append(layer_weights)
        return self.classify(x[:, 0]), weights


def shifted(images: Tensor) -> Tensor:
    """Move each image by -1, 0 or 1 pixel both ways: the same digit, written a little elsewhere."""
    padded = nn.functional.pad(images, (1, 1, 1, 1))
    rows = torch.randint(3, (len(images), 1, 1)) + torch.arange(GRID).view(1, -1, 1)
    columns = torch.randint(3, (len(images), 1, 1)) + torch.arange(GRID).view(1, 1, -1)
    return padded[torch.arange(len(images)).view(-1, 1, 1), rows, columns]


def train(
    model: DigitEncoder, scans: Scans, epochs: int, batch_size: int, learning_rate: float, console: Console
) -> None:
    batches_per_epoch = math.ceil(len(scans.labels) / batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=epochs * batches_per_epoch)
    loss_of = nn.CrossEntropyLoss(label_smoothing=0.05)
    columns = (
        TextColumn("training"),
        BarColumn(),
        TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    model.train()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=epochs * batches_per_epoch, epoch=0, epochs=epochs, loss=math.nan)
        for epoch in range(1, epochs + 1):
            total_loss = 0.0
            for batch in torch.randperm(len(scans.labels)).split(batch_size):
                logits, _ = model(shifted(scans.images[batch]))
                loss = loss_of(logits, scans.labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                total_loss += loss.item()
                progress.advance(task)
            progress.update(task, epoch=epoch, loss=total_loss / batches_per_epoch)


@torch.no_grad()
def accuracy(model: DigitEncoder, scans: Scans) -> float:
    model.eval()
    logits, _ = model(scans.images)
    return (logits.argmax(-1) == scans.labels).float().mean().item()


def first_of_each_digit(scans: Scans) -> Tensor:
    """Indices of the first 0, the first 1, ... of the scans: chosen by position, not by how good they look."""
    return torch.stack([(scans.labels == digit).nonzero()[0, 0] for digit in range(CLASSES)])


@torch.no_grad()
def draw_attention(model: DigitEncoder, scans: Scans, path: Path) -> None:
    """Where the [class] token of the last layer looks: a row per head, a column per digit."""
    model.eval()
    shown = first_of_each_digit(scans)
    images = scans.images[shown]
    logits, weights = model(images)
    predictions = logits.argmax(-1)
    looks = weights[-1][:, :, 0, 1:].unflatten(-1, (GRID, GRID))  # [class] query, pixel keys: (10, n_heads, 8, 8)
    n_heads = looks.shape[1]

    tight = ConstrainedLayoutEngine(w_pad=0.015, h_pad=0.015)
    size = (CLASSES, n_heads + 1.3)  # inches: square cells, and the titles
    figure, axes = plt.subplots(1 + n_heads, CLASSES, figsize=size, layout=tight, squeeze=False)
    figure.suptitle(
        f"Where the [class] token looks: {n_heads} heads of the last layer, on the first held-out scan of each digit",
        fontsize=10,
    )
    share = PowerNorm(0.5, vmin=0, vmax=looks.max().item())  # square root: 10 % is seen beside 60 %
    for column, image in enumerate(images):
        axes[0, column].imshow(image, cmap="gray_r", vmin=0, vmax=1)
        read = int(predictions[column])
        axes[0, column].set_title(f"read as {read}", fontsize=8, color="black" if read == column else "crimson")
        for head in range(n_heads):
            axes[1 + head, column].imshow(image, cmap="gray_r", vmin=0, vmax=2.5)  # pale: the ground of the map
            look = axes[1 + head, column].imshow(looks[column, head], cmap=HEAT, norm=share)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_color("0.8")
    for row, label in enumerate(["scan", *(f"head {head + 1}" for head in range(n_heads))]):
        axes[row, 0].set_ylabel(label, fontsize=9)
    bar = figure.colorbar(look, ax=axes[1:, :], fraction=0.015, pad=0.01, format=PercentFormatter(1, decimals=0))
    bar.set_label("share of the attention", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--d-model", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0, help="of the training; the split is always the same")
    parser.add_argument("--evaluate-on", choices=["test", "validation"], default="test")
    parser.add_argument("--threshold", type=float, default=0.97, help="exit with 1 below this accuracy (0.97)")
    parser.add_argument("--output", type=Path, default=Path("digits_attention.png"))
    return parser.parse_args()


def main() -> int:
    options = arguments()
    console = Console()
    torch.manual_seed(options.seed)
    training, held_out = load(options.evaluate_on)
    model = DigitEncoder(options.d_model, options.heads, options.layers, options.dropout)
    console.print(
        f"{len(training.labels)} scans to train on, {len(held_out.labels)} held out ({options.evaluate_on}); "
        f"{sum(parameter.numel() for parameter in model.parameters())} parameters"
    )

    start = time.perf_counter()
    train(model, training, options.epochs, options.batch_size, options.learning_rate, console)
    seconds = time.perf_counter() - start

    reached = accuracy(model, held_out)
    draw_attention(model, held_out, options.output)
    console.print(
        f"{options.evaluate_on} accuracy {reached:.2%} after {seconds:.0f} s of training; wrote {options.output}"
    )
    if reached < options.threshold:
        console.print(f"[red]below the threshold of {options.threshold:.0%}[/red]")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
