"""This package's kernels in the models of the ``timm`` library; :func:`mha_ext.swap_attention` puts them there.

timm's ``forward`` runs as timm wrote it, projections, norms, rotary and relative positions included. Only its call of
``torch.nn.functional.scaled_dot_product_attention`` is answered by :func:`mha_ext.attention`.

>>> import timm, torch, mha_ext
>>> from mha_ext.integrations.timm import attention_weights
>>> model = timm.create_model("vit_tiny_patch16_224", depth=2).eval()
>>> print(mha_ext.swap_attention(model))
2 of 2 attention modules swapped
>>> with torch.no_grad(), attention_weights(model) as weights:
...     logits = model(torch.randn(1, 3, 224, 224))
>>> {name: tuple(w.shape) for name, w in weights.items()}
{'blocks.0.attn': (1, 3, 197, 197), 'blocks.1.attn': (1, 3, 197, 197)}

Source: https://huggingface.co/docs/timm
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..arguments import mask_or_bias
from ..functional import attention

try:
    from timm import layers
    from timm.models import beit, cait, eva, swin_transformer, vision_transformer_relpos
except ImportError as error:
    raise ImportError("mha_ext.integrations.timm needs timm 1.0.31 or later: pip install 'mha_ext[timm]'") from error

Keep = Callable[[Tensor], object]  # takes the weights of one call


class _Swapped(nn.Module):
    """What makes an attention module of timm, the next class in line, compute with this package."""

    _keep: Keep | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """timm's; see the class that is swapped."""
        with _Answer(self._keep) as answer:
            output = super().forward(*args, **kwargs)
        if self._keep is not None and not answer.calls:
            raise RuntimeError(f"{type(self).__name__} must call torch's scaled_dot_product_attention to hand out its "
                               "weights: is its fused_attn False, or that function replaced?")  # fmt: skip
        return output


class Attention(_Swapped, layers.Attention):
    """``timm.layers.Attention``, that of ViT, DeiT and their kin."""


class AttentionRope(_Swapped, layers.AttentionRope):
    """``timm.layers.AttentionRope``, with rotary positions."""


class AttentionPoolLatent(_Swapped, layers.AttentionPoolLatent):
    """``timm.layers.AttentionPoolLatent``, the learned query that pools the tokens of SigLIP's image encoder."""


class BeitAttention(_Swapped, beit.Attention):
    """``timm.models.beit.Attention``, with a learned bias for relative positions."""


class EvaAttention(_Swapped, eva.EvaAttention):
    """``timm.models.eva.EvaAttention``, that of EVA-02 and DINOv3."""


class ClassAttention(_Swapped, cait.ClassAttn):
    """``timm.models.cait.ClassAttn``: the class token attends to all."""


class WindowAttention(_Swapped, swin_transformer.WindowAttention):
    """``timm.models.swin_transformer.WindowAttention``, windows with a learned bias for relative positions."""


class RelPosAttention(_Swapped, vision_transformer_relpos.RelPosAttention):
    """``timm.models.vision_transformer_relpos.RelPosAttention``, with a bias for relative positions."""


REPLACEMENTS: dict[type[nn.Module], type[nn.Module]] = {
    theirs: ours
    for ours in (Attention, AttentionRope, AttentionPoolLatent, BeitAttention, EvaAttention, ClassAttention,
                 WindowAttention, RelPosAttention)
    for theirs in ours.__bases__[1:]
}  # fmt: skip


@contextmanager
def attention_weights(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Collect the attention weights that swapped modules of a model compute within the block.

    One pass of the fused kernel writes the output and the weights. For one thread at a time; where blocks are nested,
    the inner one collects.

    Args:
        model: a model that :func:`mha_ext.swap_attention` went over.

    Yields:
        A dict that each forward pass fills: the module's name in the model to its weights ``(B, heads, queries,
        keys)``, in the order of the calls, after dropout, of the last call where there are several. Differentiable.

    Raises:
        ValueError: no module of the model has been swapped.
        RuntimeError: in a forward pass, a module does not call ``scaled_dot_product_attention``.

    Example:
        >>> import timm, torch, mha_ext
        >>> layer = timm.layers.Attention(64, num_heads=4)
        >>> print(mha_ext.swap_attention(layer))
        1 of 1 attention modules swapped
        >>> with attention_weights(layer) as weights:
        ...     output = layer(torch.randn(2, 10, 64))
        >>> weights[""].shape
        torch.Size([2, 4, 10, 10])

    Source: https://github.com/huggingface/pytorch-image-models/blob/main/timm/utils/attention_extract.py, which does it
    for timm's attention where that is not fused
    """
    swapped = {name: module for name, module in model.named_modules() if isinstance(module, _Swapped)}
    if not swapped:
        raise ValueError("model must hold modules of timm that mha_ext.swap_attention swapped, got none")
    weights: dict[str, Tensor] = {}
    before = {name: module._keep for name, module in swapped.items()}
    for name, module in swapped.items():
        module._keep = functools.partial(weights.__setitem__, name)
    try:
        yield weights
    finally:
        for name, module in swapped.items():
            module._keep = before[name]


class _Answer(TorchFunctionMode):
    """Answers torch's scaled_dot_product_attention, and hands the weights to `keep` if there is one."""

    def __init__(self, keep: Keep | None) -> None:
        super().__init__()
        self.keep = keep
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        output, weights = _attention(*args, **(kwargs or {}), need_weights=self.keep is not None)
        if self.keep is not None and weights is not None:
            self.keep(weights)
        return output


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """The part of torch's signature that timm uses."""
    mask, bias = (None, None) if attn_mask is None else mask_or_bias("attn_mask", attn_mask)
    bias = None if bias is None else bias.to(query.dtype)
    return attention(query, key, value, mask, dropout_p, bias=bias, is_causal=is_causal, need_weights=need_weights)
