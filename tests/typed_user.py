"""A user's program, for `mypy --strict` (test_typing.py): what the type hints promise, and what they refuse.

Each `type: ignore` stands where mypy must complain; were it content, it would report the comment as unused.
"""

import torch
from torch import Tensor
from typing_extensions import assert_type

import mha_ext


def weighted(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    output, weights = mha_ext.attention(
        query, key, value, is_causal=True, causal_offset="lower_right", window=(4, None)
    )
    assert_type(output, Tensor)
    assert_type(weights, Tensor)
    return output + weights.sum()


def as_it_says(query: Tensor, need_weights: bool) -> None:
    assert_type(mha_ext.attention(query, query, query, need_weights=False, softcap=2.0), tuple[Tensor, None])
    assert_type(mha_ext.attention(query, query, query, None, 0.1, need_weights=True), tuple[Tensor, Tensor])
    assert_type(mha_ext.attention(query, query, query, need_weights=need_weights), tuple[Tensor, Tensor | None])


def steps(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = mha_ext.attention_scores(query, key, scale=0.5)
    weights = mha_ext.masked_softmax(scores, key_lengths=torch.tensor([3]), softcap=2.0)
    return mha_ext.weighted_sum(weights, value)


def options(query: Tensor) -> None:
    mha_ext.attention(query, query, query, dropout=torch.nn.Dropout(0.1), generator=torch.Generator())
    mha_ext.attention(query, query, query, dropout=lambda weights: weights * 2)
    mha_ext.attention(query, query, "value")  # type: ignore[call-overload]
    mha_ext.attention(query, query, query, window=3)  # type: ignore[call-overload]
    mha_ext.attention(query, query, query, casual=True)  # type: ignore[call-overload]
    mha_ext.scaled_dot_product_attention(query, query, query, dropout_p="0.1")  # type: ignore[arg-type]


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = mha_ext.MultiHeadAttention(width, n_heads=4, dropout=0.0)
        self.outer = mha_ext.nn.MultiheadAttention(width, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x, x, x)[0]
        output, weights = self.outer.forward(x, x, x, need_weights=False)
        assert_type(weights, Tensor | None)
        return output


report = mha_ext.swap_attention(torch.nn.Transformer(d_model=16, nhead=4))
assert_type(report.swapped, tuple[str, ...])
assert_type(report.left, dict[str, str])
assert_type(mha_ext.supported_isas(), list[str])
mha_ext.swap_attention("model")  # type: ignore[arg-type]
