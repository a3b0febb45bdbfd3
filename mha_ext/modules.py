"""The course's two modules. Their parameters and results are those of the course, so its checkpoints load strictly."""

from __future__ import annotations

from torch import Tensor, nn

from .arguments import check_divisor, probability
from .functional import attention


class SelfAttention(nn.Module):
    """Scaled dot-product attention with dropout on the weights.

    Args:
        dropout: probability of dropping a weight in training mode; default 0.1.

    Raises:
        TypeError: ``dropout`` is not a number.
        ValueError: ``dropout`` outside [0, 1].

    Example:
        >>> import torch, mha_ext
        >>> x = torch.randn(2, 4, 512)
        >>> out, attn = mha_ext.SelfAttention(dropout=0.1).eval()(x, x, x)
        >>> out.shape, attn.shape
        (torch.Size([2, 4, 512]), torch.Size([2, 4, 4]))

    Source: Vaswani et al., "Attention Is All You Need", 2017, section 3.2.1, https://arxiv.org/abs/1706.03762
    """

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.dropout = nn.Dropout(probability("dropout", dropout))

    def forward(self, Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Output and weights of :func:`mha_ext.attention`.

        Args:
            Q: queries ``(..., H, Lq, D)``, ``(B, Lq, D)`` or ``(Lq, D)``.
            K: keys ``(..., H, Lk, D)``.
            V: values ``(..., H, Lk, Dv)``.
            mask: keep-mask that broadcasts to ``(..., H, Lq, Lk)``; 0 = hidden.

        Returns:
            Output ``(..., H, Lq, Dv)`` and the weights used, after dropout, ``(..., H, Lq, Lk)``.
        """
        return attention(Q, K, V, mask, self.dropout)


class MultiHeadAttention(nn.Module):
    """Multi-head attention with residual connection and layer normalisation: ``LayerNorm(fc(heads) + Q)``.

    Parameters are named ``W_Q``, ``W_K``, ``W_V``, ``fc`` and ``norm``, as in the course.

    Args:
        d_model: width of inputs and output.
        n_heads: number of heads; must divide ``d_model``.
        dropout: probability of dropping a weight in training mode; default 0.1.

    Raises:
        TypeError: ``d_model`` or ``n_heads`` is not an int, ``dropout`` not a number.
        ValueError: ``d_model`` is not a positive multiple of ``n_heads``, or ``dropout`` lies outside [0, 1].

    Example:
        >>> import torch, mha_ext
        >>> x = torch.randn(2, 4, 512)
        >>> out, attn = mha_ext.MultiHeadAttention(d_model=512, n_heads=8)(x, x, x)
        >>> out.shape, attn.shape
        (torch.Size([2, 4, 512]), torch.Size([2, 8, 4, 4]))

    Source: Vaswani et al., "Attention Is All You Need", 2017, section 3.2.2, https://arxiv.org/abs/1706.03762
    """

    def __init__(self, d_model: int, n_heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        check_divisor("d_model", d_model, "n_heads", n_heads)
        self.d_model = d_model
        self.n_heads = n_heads
        self.W_Q = nn.Linear(d_model, d_model)
        self.W_K = nn.Linear(d_model, d_model)
        self.W_V = nn.Linear(d_model, d_model)
        self.fc = nn.Linear(d_model, d_model)
        self.norm = nn.LayerNorm(d_model)
        self.attention = SelfAttention(dropout)

    def forward(self, Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Attend from ``Q`` to ``K`` and ``V`` with every head.

        Args:
            Q: ``(B, Lq, d_model)``.
            K: ``(B, Lk, d_model)``.
            V: ``(B, Lk, d_model)``.
            mask: keep-mask that broadcasts to ``(B, n_heads, Lq, Lk)``; 0 = hidden. One per batch entry has shape
                ``(B, 1, Lq, Lk)`` (or ``(B, 1, 1, Lk)`` for padding).

        Returns:
            Output ``(B, Lq, d_model)`` and the weights of every head ``(B, n_heads, Lq, Lk)``.

        Raises:
            TypeError: an input that is not a tensor.
            ValueError: an input that is not ``(B, L, d_model)``.
        """
        for name, x in (("Q", Q), ("K", K), ("V", V)):
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
            if x.dim() != 3 or x.shape[-1] != self.d_model:
                raise ValueError(f"{name} must have shape (batch, length, {self.d_model}), got {tuple(x.shape)}")
        q, k, v = (self._split(layer(x)) for layer, x in ((self.W_Q, Q), (self.W_K, K), (self.W_V, V)))
        heads, attn = self.attention(q, k, v, mask)
        merged = heads.transpose(1, 2).flatten(2)
        return self.norm(self.fc(merged) + Q), attn

    def _split(self, x: Tensor) -> Tensor:
        """``(B, L, d_model)`` to ``(B, n_heads, L, d_model / n_heads)``, a view."""
        return x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, n_heads={self.n_heads}"
