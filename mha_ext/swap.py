"""``swap_attention``: this package's attention in a model that was written for torch's."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from . import ops
from .nn import MultiheadAttention


class SwapReport(NamedTuple):
    """What :func:`swap_attention` did, by the modules' names in the model; ``str()`` of it is for people.

    Example:
        >>> import torch, mha_ext
        >>> layers = torch.nn.ModuleList([torch.nn.MultiheadAttention(8, 2), mha_ext.nn.MultiheadAttention(8, 2)])
        >>> print(mha_ext.swap_attention(layers))
        1 of 2 attention modules swapped
          1: it is mha_ext's already
    """

    swapped: tuple[str, ...]  #: modules that are now :class:`mha_ext.nn.MultiheadAttention`
    left: dict[str, str]  #: attention modules that are not, and why

    def __str__(self) -> str:
        total = len(self.swapped) + len(self.left)
        lines = [f"{len(self.swapped)} of {total} attention modules swapped"]
        return "\n".join(lines + [f"  {name or 'the model'}: {reason}" for name, reason in self.left.items()])


def swap_attention(model: nn.Module) -> SwapReport:
    """Make every ``torch.nn.MultiheadAttention`` of a model a :class:`mha_ext.nn.MultiheadAttention`, in place.

    The modules stay the objects they are, with their parameters, hooks and training mode: only what computes them
    changes, so optimisers, ``state_dict`` and references from elsewhere stay valid.

    Args:
        model: any module, also a ``torch.nn.MultiheadAttention`` itself.

    Returns:
        The names of the modules that were swapped, and of attention modules that were left, with the reason: subclasses
        of torch's module (their own behaviour would be lost), parameters of a dtype or on a device without kernels.

    Raises:
        TypeError: ``model`` is not a module.

    Example:
        >>> import torch, mha_ext
        >>> model = torch.nn.Transformer(d_model=16, nhead=4, num_encoder_layers=1, num_decoder_layers=1)
        >>> report = mha_ext.swap_attention(model)
        >>> print(report)
        3 of 3 attention modules swapped
        >>> report.swapped[0]
        'encoder.layers.0.self_attn'

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    swapped: list[str] = []
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.MultiheadAttention):
            continue
        reason = _why_not(module)
        if reason is None:
            module.__class__ = MultiheadAttention
            module._qkv_same_embed_dim = False  # see MultiheadAttention._reset_parameters
            swapped.append(name)
        else:
            left[name] = reason
    return SwapReport(tuple(swapped), left)


def _why_not(module: nn.MultiheadAttention) -> str | None:
    if isinstance(module, MultiheadAttention):
        return "it is mha_ext's already"
    if type(module) is not nn.MultiheadAttention:
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        return f"it is a {kind}, a subclass of torch.nn.MultiheadAttention whose own behaviour would be lost"
    for name, parameter in module.named_parameters():
        if parameter.dtype not in ops.FLOAT_DTYPES:
            return f"{name} is {parameter.dtype}, for which there are no kernels"
        if parameter.device.type not in ops.DEVICES:
            return f"{name} is on {parameter.device}, but there are kernels for {ops.KERNELS}"
    return None
