"""Suites `attention`, `modules` and `overhead`: whole calls, at the sizes of models in use and at the smallest.

Two baselines each: plain torch maths (matmul, softmax, matmul), which returns the weights as we can, and torch's
scaled_dot_product_attention, which never forms them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import mha_ext

from .cases import (
    OURS,
    Case,
    Contest,
    Function,
    Results,
    Work,
    only,
    product_flops,
    random_inputs,
    trained,
    visible_pairs,
    with_gradients,
)

__all__ = ["attention", "modules", "overhead"]

MATHS = "torch maths"
SDPA = "torch SDPA"


@dataclass(frozen=True)
class Model:
    """One attention layer of a model: B, H, Hkv, L, D, and whether a token sees the tokens after it."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    is_causal: bool = False

    @property
    def is_grouped(self) -> bool:
        return self.kv_heads != self.heads

    @property
    def query(self) -> tuple[int, ...]:
        return self.batch, self.heads, self.length, self.head_dim

    @property
    def key(self) -> tuple[int, ...]:
        return self.batch, self.kv_heads, self.length, self.head_dim

    def work(self, products: int) -> Work:
        pairs = visible_pairs(self.length, self.length, self.is_causal)
        return Work(flops=product_flops(self.batch * self.heads, pairs, self.head_dim, products))

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.kv_heads}" if self.is_grouped else f"{self.heads}"
        return f"{self.batch},{heads},{self.length},{self.head_dim}{' causal' if self.is_causal else ''}"


MODELS = (
    Model("BERT base", 8, 12, 12, 512, 64),
    Model("ViT-B/16", 32, 12, 12, 197, 64),
    Model("GPT-2", 1, 12, 12, 1024, 64, is_causal=True),
    Model("Whisper base encoder", 1, 8, 8, 1500, 64),
    Model("Llama 3.2 1B prefill", 1, 32, 8, 512, 64, is_causal=True),
)
QUICK_MODELS = (Model("BERT base, short", 2, 12, 12, 64, 64),)
TINY = Model("smallest call", 2, 1, 1, 4, 64)


def maths(model: Model, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Plain torch: output and weights."""
    group = model.heads // model.kv_heads
    if group > 1:
        key, value = key.repeat_interleave(group, -3), value.repeat_interleave(group, -3)
    scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(model.head_dim)
    if model.is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    weights = torch.softmax(scores, -1)
    return torch.matmul(weights, value), weights


def functions(model: Model) -> dict[str, Function]:
    """The contestants that return the output alone, each (query, key, value) -> output."""

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return mha_ext.attention(
            query, key, value, is_causal=model.is_causal, enable_gqa=model.is_grouped, need_weights=False
        )[0]

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return maths(model, query, key, value)[0]

    def sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=model.is_causal, enable_gqa=model.is_grouped)

    return {OURS: ours, MATHS: plain, SDPA: sdpa}


def output_and_weights(model: Model, dtype: torch.dtype) -> Contest:
    query, key, value = random_inputs(dtype, model.query, model.key, model.key)

    def ours() -> Results:
        output, weights = mha_ext.attention(query, key, value, is_causal=model.is_causal, enable_gqa=model.is_grouped)
        assert weights is not None  # need_weights is True
        return output, weights

    return Contest(
        (query, key, value), partial(maths, model), {OURS: ours, MATHS: lambda: maths(model, query, key, value)}
    )


def output_only(model: Model, dtype: torch.dtype) -> Contest:
    inputs = random_inputs(dtype, model.query, model.key, model.key)
    calls = {name: only(function) for name, function in functions(model).items()}
    return Contest(inputs, calls[MATHS], {name: partial(call, *inputs) for name, call in calls.items()})


def forward_backward(model: Model, dtype: torch.dtype) -> Contest:
    inputs = random_inputs(dtype, model.query, model.key, model.key, model.query)
    return trained(inputs, functions(model)[MATHS], functions(model))


def attention_cases(model: Model, dtype: torch.dtype) -> list[Case]:
    """Output and weights, output alone, and the training of it."""
    recipes: list[tuple[str, int, Callable[[Model, torch.dtype], Contest]]] = [
        ("output and weights", 2, output_and_weights),
        ("output", 2, output_only),
        ("forward + backward", 6, forward_backward),  # of stored weights: nothing is recomputed
    ]
    return [
        Case(
            f"{model.name}, {name}", str(model), dtype, model.work(products), model.length, partial(make, model, dtype)
        )
        for name, products, make in recipes
    ]


def attention(quick: bool) -> list[Case]:
    """The function `attention` at the layer sizes of models in use."""
    models = QUICK_MODELS if quick else MODELS
    return [
        case for dtype in (torch.float32, torch.bfloat16) for model in models for case in attention_cases(model, dtype)
    ]


def overhead(quick: bool) -> list[Case]:
    """Almost nothing to compute: what a call costs by itself."""
    return attention_cases(TINY, torch.float32)


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
    recipes = [("forward", 1, module_forward), ("forward + backward", 3, module_trained)]
    return [
        Case(
            f"{layer.name}, {name}",
            str(layer),
            dtype,
            layer.work(passes),
            max(layer.length, layer.d_model),
            partial(make, layer, dtype),
        )
        for dtype in (torch.float32, torch.bfloat16)
        for layer in layers
        for name, passes, make in recipes
    ]


@dataclass(frozen=True)
class Twins:
    """The three modules with one set of parameters, their input, and the formula as a function of both.

    The parameters are inputs of the formula, so that the float64 reference rounds them as little as the data.
    """

    modules: dict[str, nn.Module]
    inputs: tuple[Tensor, ...]  # x, then every parameter
    output: Function  # (x, *parameters) -> output


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
    return Twins({OURS: ours, MATHS: plain, SDPA: fused}, (x, *state.values()), output)


def module_forward(layer: Layer, dtype: torch.dtype) -> Contest:
    three = twins(layer, dtype)
    x = three.inputs[0]

    @torch.no_grad()
    def run(module: nn.Module) -> Results:
        return (module(x, x, x)[0],)

    contestants = {name: partial(run, module) for name, module in three.modules.items()}
    return Contest(three.inputs, only(three.output), contestants)


def module_trained(layer: Layer, dtype: torch.dtype) -> Contest:
    three = twins(layer, dtype)
    x, (grad_output,) = three.inputs[0], random_inputs(dtype, three.inputs[0].shape)

    def run(module: nn.Module, leaf: Tensor, wanted: list[Tensor]) -> Results:
        output = module(leaf, leaf, leaf)[0]
        return output.detach(), *torch.autograd.grad(output, wanted, grad_output)

    contestants = {}
    for name, module in three.modules.items():
        leaf = x.detach().requires_grad_()
        contestants[name] = partial(run, module, leaf, [leaf, *module.parameters()])

    def reference(*inputs: Tensor) -> Results:
        return with_gradients(three.output, inputs, grad_output.to(inputs[0].dtype))()

    return Contest(three.inputs, reference, contestants)
