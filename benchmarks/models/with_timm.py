"""Models of timm: as timm computes them, with torch's SDPA, and after `mha_ext.swap_attention`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import timm
import torch
from timm.utils import AttentionExtract
from torch import Tensor, nn

from mha_ext.bench.cases import OURS, Results
from mha_ext.integrations.timm import attention_weights

from .model import Call, Inputs, Library, beside_ours

__all__ = ["LIBRARY"]

TIMM = "timm"


@dataclass(frozen=True)
class TimmModel:
    """`options` are those of timm.create_model."""

    name: str
    model: str
    batch: int
    side: int = 224
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.batch},{self.side}x{self.side} pixels"

    def inputs(self) -> Inputs:
        generator = torch.Generator().manual_seed(1)
        return {"x": torch.randn(self.batch, 3, self.side, self.side, generator=generator)}

    def implementations(self, dtype: torch.dtype) -> dict[str, nn.Module]:
        torch.manual_seed(1)
        model = timm.create_model(self.model, **self.options).to(dtype).eval()
        return beside_ours(TIMM, model)

    def forward(self, module: nn.Module, inputs: Inputs) -> Tensor:
        return module(**inputs)

    def attentions(self, implementation: str, module: nn.Module) -> Call | None:
        return our_weights(module) if implementation == OURS else timm_weights(module)


def our_weights(module: nn.Module) -> Call:
    def run(inputs: Inputs) -> Results:
        with attention_weights(module) as weights:
            output = module(**inputs)
        return output, *weights.values()

    return run


def timm_weights(module: nn.Module) -> Call:
    """timm's way: every module off its fused path, and hooks where the weights pass. They return no output."""
    unfused = copy.deepcopy(module)
    for part in unfused.modules():
        if hasattr(part, "fused_attn"):
            part.fused_attn = False  # type: ignore[assignment]
    outputs: list[Tensor] = []
    unfused.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    extract = AttentionExtract(unfused, names=["*attn_drop"], method="hook")

    def run(inputs: Inputs) -> Results:
        weights = extract(inputs["x"])
        return outputs.pop(), *weights.values()

    return run


MODELS = (
    TimmModel("ViT-B/16 of timm", "vit_base_patch16_224", 4),
    TimmModel("Swin-T of timm", "swin_tiny_patch4_window7_224", 4),  # with a learned bias
)
SMALL = dict(embed_dim=32, num_classes=5)
QUICK_MODELS = (
    TimmModel("tiny ViT of timm", "vit_tiny_patch16_224", 2, 32, dict(**SMALL, img_size=32, depth=2, num_heads=2)),
    TimmModel("tiny Swin of timm", "swin_tiny_patch4_window7_224", 2, 56,
              dict(**SMALL, img_size=56, depths=(1, 1), num_heads=(2, 2))),
)  # fmt: skip
LIBRARY = Library("timm", (TIMM,), MODELS, QUICK_MODELS)
