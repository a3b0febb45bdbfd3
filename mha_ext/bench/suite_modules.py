"""Suite `modules`: a whole layer, projections and all, against the same layer in plain torch and on SDPA."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import mha_ext

from .cases import OURS, PLAIN, SDPA, Case, Contest, Results, Work, product_flops, random_inputs, trained

__all__ = ["Layer", "PlainMultiHeadAttention", "modules"]


class PlainMultiHeadAttention(nn.Module):
    """mha_ext.MultiHeadAttention in plain torch, without dropout: the same parameters, the same result.

    With `fused`, torch's scaled_dot_product_attention does the attention and no weights are returned.
    """

    def __init__(self, d_model: int, n_heads: int, fused: bool) -> None:
        super().__init__()
        self.n_heads, self.fused = n_heads, fused
        self.W_Q, self.W_K, self.W_V, self.fc = (nn.Linear(d_model, d_model) for _ in range(4))
        self.norm = nn.LayerNorm(d_model)

    def forward(self, Q: Tensor, K: Tensor, V: Tensor) -> tuple[Tensor, Tensor | None]:
        def heads(x: Tensor) -> Tensor:
            return x.unflatten(-1, (self.n_heads, -1)).transpose(-2, -3)

        query, key, value = heads(self.W_Q(Q)), heads(self.W_K(K)), heads(self.W_V(V))
        if self.fused:
            output, weights = scaled_dot_product_attention(query, key, value), None
        else:
            scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(query.shape[-1])
            weights = torch.softmax(scores, -1)
            output = torch.matmul(weights, value)
        return self.norm(self.fc(output.transpose(-2, -3).flatten(-2)) + Q), weights


@dataclass(frozen=True)
class Layer:
    """Sizes of a MultiHeadAttention module."""

    name: str
    batch: int
    length: int
    d_model: int
    n_heads: int

    def work(self, passes: int) -> Work:
        """Four projections and two products; a backward does twice the work of a forward (`passes` 3 in all)."""
        projections = 4 * 2 * self.batch * self.length * self.d_model**2
        pairs = self.length**2
        products = product_flops(self.batch * self.n_heads, pairs, self.d_model // self.n_heads, 2)
        return Work(flops=passes * (projections + products))

    def __str__(self) -> str:
        return f"{self.batch},{self.length},{self.d_model}, {self.n_heads} heads"


LAYERS = (
    Layer("course example", 2, 4, 512, 8),
    Layer("BERT base", 8, 512, 768, 12),
    Layer("ViT-B/16", 8, 197, 768, 12),
)
QUICK_LAYERS = LAYERS[:1]


def modules(quick: bool) -> list[Case]:
    """MultiHeadAttention, a whole layer: projections, attention, output projection, residual and norm."""
    layers = QUICK_LAYERS if quick else LAYERS
    recipes = [
        ("forward", 1, module_forward, lambda layer: max(layer.length, layer.d_model)),
        ("forward + backward", 3, module_trained, lambda layer: max(layer.batch * layer.length, layer.d_model)),
    ]
    return [
        Case(
            f"{layer.name}, {name}",
            str(layer),
            dtype,
            layer.work(passes),
            longest_sum(layer),
            partial(make, layer, dtype),
        )
        for dtype in (torch.float32, torch.bfloat16)
        for layer in layers
        for name, passes, make, longest_sum in recipes
    ]


@dataclass(frozen=True)
class Twins:
    """The three modules with one set of parameters, their input, and the formula as a function of both.

    The parameters are inputs of the formula, so that the float64 reference rounds them as little as the data.
    """

    modules: dict[str, nn.Module]
    inputs: tuple[Tensor, ...]  # x, then every parameter
    output: Callable[..., Tensor]  # (x, *parameters) -> output


def twins(layer: Layer, dtype: torch.dtype) -> Twins:
    torch.manual_seed(1)
    ours = mha_ext.MultiHeadAttention(layer.d_model, layer.n_heads, dropout=0.0).to(dtype)
    plain = PlainMultiHeadAttention(layer.d_model, layer.n_heads, fused=False).to(dtype)
    fused = PlainMultiHeadAttention(layer.d_model, layer.n_heads, fused=True).to(dtype)
    for module in (plain, fused):
        module.load_state_dict(ours.state_dict())
    state = {name: parameter.detach() for name, parameter in ours.named_parameters()}

    def output(x: Tensor, *parameters: Tensor) -> Tensor:
        values = dict(zip(state, parameters, strict=True))
        return torch.func.functional_call(plain, values, (x, x, x))[0]

    (x,) = random_inputs(dtype, (layer.batch, layer.length, layer.d_model))
    return Twins({OURS: ours, SDPA: fused, PLAIN: plain}, (x, *state.values()), output)


def module_forward(layer: Layer, dtype: torch.dtype) -> Contest:
    three = twins(layer, dtype)
    x = three.inputs[0]

    @torch.no_grad()
    def run(module: nn.Module) -> Results:
        return (module(x, x, x)[0],)

    contestants = {name: partial(run, module) for name, module in three.modules.items()}
    return Contest(three.inputs, lambda *exact: (three.output(*exact),), contestants)


def module_trained(layer: Layer, dtype: torch.dtype) -> Contest:
    three = twins(layer, dtype)
    x = three.inputs[0]
    _, grad_output = random_inputs(dtype, x.shape, x.shape)

    def run(module: nn.Module, leaf: Tensor, wanted: list[Tensor]) -> Results:
        output = module(leaf, leaf, leaf)[0]
        return output.detach(), *torch.autograd.grad(output, wanted, grad_output)

    contestants = {}
    for name, module in three.modules.items():
        leaf = x.detach().requires_grad_()
        contestants[name] = partial(run, module, leaf, [leaf, *module.parameters()])

    def reference(*inputs: Tensor) -> Results:
        return trained(three.output, (*inputs, grad_output.to(inputs[0].dtype)))()

    return Contest(three.inputs, reference, contestants)
