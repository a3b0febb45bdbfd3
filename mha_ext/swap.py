"""``swap_attention``: this package's attention in a model that was written for torch's or timm's."""

from __future__ import annotations

from collections.abc import Mapping
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

    swapped: tuple[str, ...]  #: modules that are now this package's
    left: dict[str, str]  #: attention modules that are not, and why

    def __str__(self) -> str:
        total = len(self.swapped) + len(self.left)
        lines = [f"{len(self.swapped)} of {total} attention modules swapped"]
        return "\n".join(lines + [f"  {name or 'the model'}: {reason}" for name, reason in self.left.items()])


# Attention to channels or places in the sense of a factor for each; there are no queries and keys.
_GATES_OF_TIMM = tuple(f"timm.layers.{name}" for name in ("cbam", "coord_attn", "selective_kernel", "split_attn"))


class _Replacement(NamedTuple):
    by: type[nn.Module]
    attribute: str  # must be `value` in a module that becomes one
    value: bool


def swap_attention(model: nn.Module) -> SwapReport:
    """Make the attention modules of a model this package's, in place: torch's and those of the library ``timm``.

    Every ``torch.nn.MultiheadAttention`` becomes a :class:`mha_ext.nn.MultiheadAttention`, and the modules of timm that
    call ``scaled_dot_product_attention`` become the classes of :mod:`mha_ext.integrations.timm`.

    The modules stay the objects they are, with their parameters, hooks and training mode: only what computes them
    changes, so optimisers, ``state_dict`` and references from elsewhere stay valid. timm's are put on their fused path,
    where hooks on ``attn_drop`` see nothing.

    Args:
        model: any module, also an attention module itself.

    Returns:
        The names of the modules that were swapped, and of attention modules that were left, with the reason: subclasses
        of those that are swapped (their own behaviour would be lost), modules with a ``forward`` of their own, other
        attention of timm, parameters of a dtype or on a device without kernels.

    Raises:
        TypeError: ``model`` is not a module.
        ImportError: a model of timm, in a version without the modules that are swapped.

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
    # See MultiheadAttention._reset_parameters for the attribute.
    known: dict[type[nn.Module], _Replacement] = {
        nn.MultiheadAttention: _Replacement(MultiheadAttention, "_qkv_same_embed_dim", False)
    }
    if any(_is_attention_of_timm(module) for module in model.modules()):
        known |= _timm_replacements()
    swapped: list[str] = []
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        if not (isinstance(module, tuple(known)) or _is_attention_of_timm(module)):
            continue
        reason = _why_not(module, known)
        if reason is None:
            replacement = known[type(module)]
            module.__class__ = replacement.by
            setattr(module, replacement.attribute, replacement.value)
            swapped.append(name)
        else:
            left[name] = reason
    return SwapReport(tuple(swapped), left)


def _is_of_timm(module: nn.Module) -> bool:
    return any(kind.__module__.startswith("timm.") for kind in type(module).__mro__)


def _is_attention_of_timm(module: nn.Module) -> bool:
    """By the flag of modules that can call torch's fused attention, and by the names of those that never do."""
    kind = type(module)
    named_so = any(word in kind.__name__ for word in ("Attention", "Attn", "MHSA", "GPSA"))
    is_gate = kind.__module__ in _GATES_OF_TIMM
    return _is_of_timm(module) and not is_gate and (named_so or hasattr(module, "fused_attn"))


def _timm_replacements() -> dict[type[nn.Module], _Replacement]:
    """Imported for a model of timm only: the library need not be installed."""
    from .integrations.timm import REPLACEMENTS

    return {theirs: _Replacement(ours, "fused_attn", True) for theirs, ours in REPLACEMENTS.items()}


def _why_not(module: nn.Module, known: Mapping[type[nn.Module], _Replacement]) -> str | None:
    if isinstance(module, tuple(replacement.by for replacement in known.values())):
        return "it is mha_ext's already"
    if type(module) not in known:
        kind = _qualified(type(module))
        base = next((_qualified(theirs) for theirs in known if isinstance(module, theirs)), None)
        if base is not None:
            return f"it is a {kind}, a subclass of {base} whose own behaviour would be lost"
        return f"it is a {kind}, for which mha_ext has no replacement"
    if "forward" in vars(module):
        return "its forward has been replaced in the module itself"
    for name, parameter in module.named_parameters():
        if parameter.dtype not in ops.FLOAT_DTYPES:
            return f"{name} is {parameter.dtype}, for which there are no kernels"
        if parameter.device.type not in ops.DEVICES:
            return f"{name} is on {parameter.device}, but there are kernels for {ops.KERNELS}"
    return None


def _qualified(kind: type[nn.Module]) -> str:
    if kind is nn.MultiheadAttention:
        return "torch.nn.MultiheadAttention"
    return f"{kind.__module__}.{kind.__qualname__}"
