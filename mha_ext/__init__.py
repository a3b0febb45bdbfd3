"""Attention for PyTorch with native kernels: the output, the weights, and every derivative.

>>> import torch, mha_ext
>>> query = key = value = torch.randn(2, 8, 16, 64)
>>> output, weights = mha_ext.attention(query, key, value, is_causal=True)
"""

from . import nn, reference
from ._load import core as _core
from .functional import attention, attention_scores, masked_softmax, scaled_dot_product_attention, weighted_sum
from .modules import MultiHeadAttention, SelfAttention
from .swap import SwapReport, swap_attention

__version__ = "0.1.0"


def supported_isas() -> list[str]:
    """Instruction-set levels this machine can run, lowest first, such as ``["generic", "avx2", "avx512"]``.

    Example:
        >>> import mha_ext
        >>> mha_ext.supported_isas()[0]
        'generic'
    """
    return list(_core.supported_isas())


def isa() -> str:
    """The level in use: the highest supported one, unless the environment variable ``MHA_EXT_ISA`` or :func:`set_isa`
    named another.

    Raises:
        ValueError: ``MHA_EXT_ISA`` names a level that is unknown or that the machine lacks.

    Example:
        >>> import mha_ext
        >>> mha_ext.isa() in mha_ext.supported_isas()
        True
    """
    return str(_core.isa())


def set_isa(name: str) -> None:
    """Use level ``name`` from now on, in the whole process: for tests and comparisons.

    Raises:
        ValueError: ``name`` is unknown or the machine lacks it.

    Example:
        >>> import mha_ext
        >>> before = mha_ext.isa()
        >>> mha_ext.set_isa("generic")
        >>> mha_ext.set_isa(before)
    """
    _core.set_isa(name)


def build_info() -> dict[str, object]:
    """What the compiled part was built with: compiler, C++ standard, torch headers, oldest torch it runs on.

    Example:
        >>> import mha_ext
        >>> sorted(mha_ext.build_info())
        ['compiler', 'cpp_standard', 'pybind11', 'torch_headers', 'torch_target']
    """
    return dict(_core.build_info())


__all__ = [
    "MultiHeadAttention",
    "SelfAttention",
    "SwapReport",
    "attention",
    "attention_scores",
    "build_info",
    "isa",
    "masked_softmax",
    "nn",
    "reference",
    "scaled_dot_product_attention",
    "set_isa",
    "supported_isas",
    "swap_attention",
    "weighted_sum",
]
