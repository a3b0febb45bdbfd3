"""``attn_implementation="mha_ext"`` for the models of the ``transformers`` library.

A model that goes through the library's attention interface then runs the fused kernels for everything: padding, causal
and sliding-window masks, grouped heads and key/value caches, softcap, sinks, position biases with their gradient,
dropout, and ``output_attentions=True``, for which the library otherwise needs its eager implementation.

Models that compute attention by themselves are refused when they make a mask; some of them do earlier, in words of the
library. (``model.is_backend_compatible()`` is false for these, but for some that work as well, such as T5.)
"""

from __future__ import annotations

import functools
import sys
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..arguments import mask_or_bias
from ..functional import attention

NAME = "mha_ext"

# Arguments that some models pass to some implementations, and which would change the result: what they stand for.
_UNSUPPORTED = {
    "cu_seq_lens_q": "sequences that are packed by cumulative lengths (cu_seq_lens_q)",
    "indices": "a choice of single keys for each query (indices)",
    "block_indices": "a choice of blocks of keys for each query (block_indices)",
    "sinks": "sinks for single queries (sinks)",
}


def register() -> None:
    """Make ``attn_implementation="mha_ext"`` known to ``transformers``; calling it again changes nothing.

    Attentions are returned for ``model(..., output_attentions=True)`` and ``generate(..., output_attentions=True,
    return_dict_in_generate=True)``. They are those of the eager implementation, after dropout, but 0 in the rows of
    padding that see no key at all, where that one spreads them evenly.

    Raises:
        ImportError: ``transformers`` is not installed.
        NotImplementedError: in a forward pass, from a model that computes attention by itself.

    Example:
        >>> import torch, transformers
        >>> import mha_ext.integrations.transformers
        >>> mha_ext.integrations.transformers.register()
        >>> config = transformers.LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        ...                                   num_attention_heads=4, num_key_value_heads=2)
        >>> model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="mha_ext")
        >>> out = model(torch.arange(10)[None], output_attentions=True)
        >>> len(out.attentions), out.attentions[0].shape
        (2, torch.Size([1, 4, 10, 10]))

    Source: https://huggingface.co/docs/transformers/attention_interface
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ImportError(
            "mha_ext.integrations.transformers needs the library: pip install 'mha_ext[transformers]'"
        ) from error

    def keep_mask(*, config: Any, **how: Any) -> Tensor | None:
        """True may attend, for all heads; None where causality says it all: what the kernels want."""
        _refuse_attention_of_its_own(type(config))
        mask: Tensor | None = sdpa_mask(config=config, **how)
        return mask

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, keep_mask)


@torch.compiler.assume_constant_result
def _refuse_attention_of_its_own(config: type) -> None:
    """Some models ask for masks, but add them to scores of their own: a keep-mask would hide nothing there."""
    module = _module_with_attention_of_its_own(config)
    if module:
        raise NotImplementedError(f"mha_ext's attention does not support models that compute attention by themselves, "
                                  f"as {module} does: use attn_implementation=\"eager\"")  # fmt: skip


@functools.cache
def _module_with_attention_of_its_own(config: type) -> str | None:
    """Of the modules of the model's package, the one that makes masks and does not use the attention interface."""
    package = next((base.__module__.rpartition(".")[0] for base in config.__mro__
                    if base.__module__.startswith("transformers.models.")), None)  # fmt: skip
    for name, module in sys.modules.copy().items():
        if package is None or not name.startswith(f"{package}.modeling_"):
            continue
        makes_masks = any(
            getattr(member, "__module__", None) == "transformers.masking_utils" for member in vars(module).values()
        )
        if makes_masks and not hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
            return name
    return None


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    output_attentions: bool | None = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """What the library's attention modules call; :func:`register` hands it over.

    Args:
        module: the attention module that calls.
        query: ``(B, H, Lq, D)``.
        key: ``(B, Hkv, Lk, D)``; ``Hkv`` divides ``H``.
        value: ``(B, Hkv, Lk, Dv)``.
        attention_mask: bool: True may attend; floating point: added to the scores. Broadcasts to ``(B, H, Lq, Lk)``.
            None: no padding, and ``is_causal`` decides.
        dropout: probability of dropping a weight; default 0.
        scaling: default ``1/√D``.
        is_causal: where there is no mask and more than one query, query ``i`` sees key ``j`` only if ``j <= i``;
            default the module's ``is_causal``, and True where it has none, as the library has it.
        position_bias: added to the scaled scores, broadcasts likewise; differentiable.
        softcap: ``softcap · tanh(scores / softcap)`` bounds the scores.
        s_aux: ``(H,)`` sinks: a logit per head that takes part in the denominator only; differentiable.
        output_attentions: return the weights; they are returned, too, while the library collects them.
        others: what concerns other implementations, or the model.

    Returns:
        Output ``(B, Lq, H, Dv)`` and weights ``(B, H, Lq, Lk)``, or None unless asked for.

    Raises:
        NotImplementedError: the model asks for something else; the text names it and the model.
        TypeError, ValueError: as :func:`mha_ext.attention`.

    Example:
        >>> import torch
        >>> from mha_ext.integrations.transformers import attention_forward
        >>> query, key = torch.randn(2, 8, 5, 64), torch.randn(2, 2, 5, 64)
        >>> attention_forward(torch.nn.Module(), query, key, key, None)[0].shape
        torch.Size([2, 5, 8, 64])

    Source: https://huggingface.co/docs/transformers/attention_interface
    """
    for name, feature in _UNSUPPORTED.items():
        if others.get(name) is not None:
            _refuse(module, feature)
    if s_aux is not None and s_aux.dim() != 1:
        _refuse(module, f"sinks (s_aux) of shape {tuple(s_aux.shape)} instead of one per head")
    mask, bias = None, position_bias
    if attention_mask is not None:
        if not isinstance(attention_mask, Tensor):
            _refuse(module, f"a mask of type {type(attention_mask).__name__}")
        mask, added = mask_or_bias("attention_mask", attention_mask)
        if added is not None:
            bias = added if bias is None else bias + added
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    output, weights = attention(
        query,
        key,
        value,
        mask,
        dropout,
        bias=None if bias is None else bias.to(query.dtype),
        is_causal=attention_mask is None and bool(is_causal) and query.shape[-2] > 1,
        scale=scaling,
        softcap=softcap,
        sinks=None if s_aux is None else s_aux.to(query.dtype),
        enable_gqa=True,
        need_weights=bool(output_attentions) or _attentions_are_collected(),
    )
    return output.transpose(1, 2).contiguous(), weights


def _attentions_are_collected() -> bool:
    """Whether the library collects what attention modules return: some models, such as GPT-2, do not tell them. The
    collector is private to the library; tests pin it. Compiled code can't ask, and goes by what it is told."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    if capturing is None or torch.compiler.is_compiling():
        return False
    collector = getattr(capturing, "_active_collector", None)
    return collector is not None and any("attentions" in name for name in collector.get() or ())


def _refuse(module: nn.Module, feature: str) -> NoReturn:
    model = getattr(getattr(module, "config", None), "model_type", None)
    of = f" of the model {model!r}" if model else ""
    raise NotImplementedError(
        f"mha_ext's attention does not support {feature}, which {type(module).__name__}{of} needs"
    )
