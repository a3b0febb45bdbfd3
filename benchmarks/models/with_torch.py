"""Models of torch.nn: as torch computes them, and after `mha_ext.swap_attention`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mha_ext.bench.cases import Results

from .model import Call, Inputs, Library, beside_ours

__all__ = ["LIBRARY"]

TORCH = "torch.nn"


@dataclass(frozen=True)
class Size:
    """Entries of the batch are padded at their ends; the last of them is half padding, the first has none."""

    batch: int
    length: int
    layers: int = 12
    heads: int = 12
    width: int = 768

    def __str__(self) -> str:
        return f"{self.batch},{self.length}, {self.layers} layer{'s' * (self.layers > 1)} of {self.heads} heads"

    def tokens(self) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(self.batch, self.length, self.width, generator=generator)

    def padding(self) -> Tensor:
        """True where there is no token, as torch has it."""
        lengths = torch.linspace(self.length, self.length // 2, self.batch).long()
        return torch.arange(self.length) >= lengths[:, None]


@dataclass(frozen=True)
class Encoder:
    """nn.TransformerEncoder with its defaults: in evaluation it packs what is not padding and has a fast path."""

    size: Size
    name: str = "TransformerEncoder"

    def __str__(self) -> str:
        return str(self.size)

    def inputs(self) -> Inputs:
        return {"src": self.size.tokens(), "src_key_padding_mask": self.size.padding()}

    def implementations(self, dtype: torch.dtype) -> dict[str, nn.Module]:
        torch.manual_seed(1)
        width, heads = self.size.width, self.size.heads
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, activation="gelu", batch_first=True)
        return beside_ours(TORCH, nn.TransformerEncoder(layer, self.size.layers).to(dtype).eval())

    def forward(self, module: nn.Module, inputs: Inputs) -> Tensor:
        """Without what stands at padded positions, which means nothing."""
        return module(**inputs).masked_fill(inputs["src_key_padding_mask"].unsqueeze(-1), 0)

    def attentions(self, implementation: str, module: nn.Module) -> Call | None:
        return None  # the encoder hands none out


@dataclass(frozen=True)
class Layer:
    """One nn.MultiheadAttention; its weights are the mean over the heads, as is the default."""

    size: Size
    name: str = "MultiheadAttention"

    def __str__(self) -> str:
        return str(self.size)

    def inputs(self) -> Inputs:
        x = self.size.tokens()
        return {"query": x, "key": x, "value": x, "key_padding_mask": self.size.padding()}

    def implementations(self, dtype: torch.dtype) -> dict[str, nn.Module]:
        torch.manual_seed(1)
        layer = nn.MultiheadAttention(self.size.width, self.size.heads, dropout=0.1, batch_first=True)
        return beside_ours(TORCH, layer.to(dtype).eval())

    def forward(self, module: nn.Module, inputs: Inputs) -> Tensor:
        return module(**inputs, need_weights=False)[0]

    def attentions(self, implementation: str, module: nn.Module) -> Call | None:
        def run(inputs: Inputs) -> Results:
            output, weights = module(**inputs)
            return output, weights

        return run


MODELS = (
    Encoder(Size(4, 128)),
    Encoder(Size(2, 512)),
    Layer(Size(4, 128, layers=1)),
    Layer(Size(2, 512, layers=1)),
)
QUICK_MODELS = (
    Encoder(Size(2, 9, layers=2, heads=2, width=32), "tiny TransformerEncoder"),
    Layer(Size(2, 9, layers=1, heads=2, width=32), "tiny MultiheadAttention"),
)
LIBRARY = Library("torch", (TORCH,), MODELS, QUICK_MODELS)
