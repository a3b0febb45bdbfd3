"""Models of the transformers library: its eager attention, its call of SDPA, and ours."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoModel, BertConfig, PretrainedConfig, ViTConfig

from mha_ext.bench.cases import OURS, Results
from mha_ext.integrations.transformers import register

from .model import Call, Inputs, Library

__all__ = ["LIBRARY"]

EAGER, SDPA = "HF eager", "HF sdpa"
IMPLEMENTATIONS = {EAGER: "eager", SDPA: "sdpa", OURS: "mha_ext"}

register()


@dataclass(frozen=True)
class TransformersModel:
    """`length` tokens, or one picture of as many patches and a class token."""

    name: str
    batch: int
    length: int
    config: PretrainedConfig

    def __str__(self) -> str:
        heads, layers = self.config.num_attention_heads, self.config.num_hidden_layers
        return f"{self.batch},{self.length}, {layers} layers of {heads} heads"

    def inputs(self) -> Inputs:
        generator = torch.Generator().manual_seed(1)
        if isinstance(self.config, ViTConfig):
            side = self.config.image_size
            return {"pixel_values": torch.randn(self.batch, 3, side, side, generator=generator)}
        shape, words = (self.batch, self.length), self.config.vocab_size
        return {"input_ids": torch.randint(words, shape, generator=generator)}

    def implementations(self, dtype: torch.dtype) -> dict[str, nn.Module]:
        torch.manual_seed(1)
        model = AutoModel.from_config(copy.deepcopy(self.config)).to(dtype).eval()
        models = {name: copy.deepcopy(model) for name in IMPLEMENTATIONS}
        for name, implementation in IMPLEMENTATIONS.items():
            models[name].set_attn_implementation(implementation)
        return models

    def forward(self, module: nn.Module, inputs: Inputs) -> Tensor:
        return module(**inputs).last_hidden_state

    def attentions(self, implementation: str, module: nn.Module) -> Call | None:
        def run(inputs: Inputs) -> Results:
            out = module(**inputs, output_attentions=True)
            return out.last_hidden_state, *out.attentions

        return None if implementation == SDPA else run


MINILM = dict(num_hidden_layers=6, hidden_size=384, intermediate_size=1536)
MODELS = (
    TransformersModel("BERT base", 4, 128, BertConfig()),
    TransformersModel("BERT base", 2, 512, BertConfig()),
    TransformersModel("MiniLM", 16, 128, BertConfig(**MINILM)),
    TransformersModel("ViT-B/16", 4, 197, ViTConfig()),
)
SMALL = dict(num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2)
QUICK_MODELS = (
    TransformersModel("tiny BERT", 2, 9, BertConfig(**SMALL)),
    TransformersModel("tiny ViT", 2, 5, ViTConfig(**SMALL, image_size=32)),
)
LIBRARY = Library("transformers", (EAGER, SDPA), MODELS, QUICK_MODELS)
