"""``mha_ext.nn.MultiheadAttention``: torch's module of that name, computed by this package's kernels.

>>> import torch, mha_ext
>>> theirs, ours = torch.nn.MultiheadAttention(8, 2), mha_ext.nn.MultiheadAttention(8, 2)
>>> ours.load_state_dict(theirs.state_dict())
<All keys matched successfully>
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from . import arguments as args
from . import composition
from .arguments import SoftmaxOptions


class MultiheadAttention(torch.nn.MultiheadAttention):
    """Drop-in for :class:`torch.nn.MultiheadAttention`: its constructor, parameters, ``state_dict`` and ``forward``.

    What differs, all of it where torch's raises, returns NaN or is slow:

    - a query that sees no key gets weights 0 and output ``out_proj.bias``, never NaN; gradients stay finite;
    - ``is_causal`` needs no ``attn_mask``, and combines with any masks: a key is visible when all of them agree;
    - asking for the weights does not leave the fused kernel, and for their mean over the heads the weights of single
      heads are never held (on CPU; elsewhere they are, until they have been averaged);
    - masks of different types go together: bool hides, floating point is added.

    It is an instance of torch's class, which torch's encoder asks for; the encoder's own fast path, which would compute
    attention without this module, declines it.

    Args:
        embed_dim: width of queries and output.
        num_heads: number of heads; must divide ``embed_dim``.
        dropout: probability of dropping a weight in training mode; default 0.
        bias: whether the projections have biases; default True.
        add_bias_kv: append a learned key and value to those of every entry; default False.
        add_zero_attn: append a key and a value of zeros; default False.
        kdim: width of keys; default ``embed_dim``.
        vdim: width of values; default ``embed_dim``.
        batch_first: inputs and output are ``(B, L, width)`` instead of ``(L, B, width)``; default False.
        device: of the parameters; default torch's.
        dtype: of the parameters; default torch's.

    Raises:
        TypeError: ``embed_dim`` or ``num_heads`` is not an int, ``dropout`` not a number.
        ValueError: ``embed_dim`` is not a positive multiple of ``num_heads``, or ``dropout`` lies outside [0, 1].

    Example:
        >>> import torch, mha_ext
        >>> layer = mha_ext.nn.MultiheadAttention(512, 8, batch_first=True)
        >>> x = torch.randn(2, 10, 512)
        >>> padding = torch.arange(10) >= torch.tensor([[10], [7]])  # True is hidden
        >>> output, weights = layer(x, x, x, key_padding_mask=padding, is_causal=True)
        >>> output.shape, weights.shape
        (torch.Size([2, 10, 512]), torch.Size([2, 10, 10]))

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html
    """

    # torch declares these without the None that they may be.
    in_proj_weight: torch.nn.Parameter | None  # type: ignore[assignment]
    in_proj_bias: torch.nn.Parameter | None  # type: ignore[assignment]

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        args.check_divisor("embed_dim", embed_dim, "num_heads", num_heads)
        args.probability("dropout", dropout)
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )

    def _reset_parameters(self) -> None:
        """torch's, which goes by ``_qkv_same_embed_dim``. At all other times that is False: it is what torch's encoder
        asks before it computes attention by itself, from the weights of this module."""
        self._qkv_same_embed_dim = self.in_proj_weight is not None
        super()._reset_parameters()
        self._qkv_same_embed_dim = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from ``query`` to ``key`` and ``value`` with every head.

        Args:
            query: ``(B, Lq, embed_dim)`` with ``batch_first``, else ``(Lq, B, embed_dim)``; ``(Lq, embed_dim)`` without
                a batch. Self-attention without masks takes a nested tensor, too, and returns one.
            key: ``(B, Lk, kdim)``, ``(Lk, B, kdim)`` or ``(Lk, kdim)``.
            value: ``(B, Lk, vdim)``, ``(Lk, B, vdim)`` or ``(Lk, vdim)``.
            key_padding_mask: ``(B, Lk)``, or ``(Lk,)`` without a batch. Bool: True is hidden; floating point: added to
                the scores of each key, which is hidden where it is ``-inf``.
            need_weights: return the weights; default True.
            attn_mask: ``(Lq, Lk)``, or ``(B · num_heads, Lq, Lk)`` (``(num_heads, Lq, Lk)`` without a batch). Bool:
                True is hidden; floating point: added to the scaled scores, differentiable.
            average_attn_weights: return the mean of the weights over the heads; default True.
            is_causal: query ``i`` sees key ``j`` only if ``j <= i``, besides what the masks say; default False.

        Returns:
            Output, of the query's shape, and the weights after dropout: ``(B, Lq, Lk)``, or ``(B, num_heads, Lq, Lk)``
            unless averaged, without ``B`` where the inputs have none; None if not needed. Keys that ``add_bias_kv`` and
            ``add_zero_attn`` append, which every query sees, are the last columns.

        Raises:
            TypeError: not a tensor, a mask that is neither bool nor floating point, dtypes that differ.
            ValueError: shapes that do not fit.
            NotImplementedError: sparse or nested tensors, devices without kernels.
        """
        for name, flag in (("need_weights", need_weights), ("average_attn_weights", average_attn_weights),
                           ("is_causal", is_causal)):  # fmt: skip
            args.check_flag(name, flag)
        if isinstance(query, Tensor) and query.is_nested:
            if query is not key or key is not value or key_padding_mask is not None or attn_mask is not None:
                raise NotImplementedError("query must be a dense tensor, got a nested one, which goes with "
                                          "self-attention without masks only")  # fmt: skip
            return self._nested_self_attention(query, need_weights, average_attn_weights, is_causal)
        self._check_inputs(query, key, value)
        batched = query.dim() == 3
        q, k, v = (self._heads(x, batched) for x in self._projected(query, key, value))
        mask, bias = self._masks(key_padding_mask, attn_mask, q, k, batched)
        if bias is not None:
            bias = bias.to(q.dtype)
        added = (self.bias_k is not None) + bool(self.add_zero_attn)
        if added:
            if is_causal:  # the kernels' causality would hide what is appended
                causal = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
                mask, is_causal = causal if mask is None else mask & causal, False
            k, v = self._with_added_keys(k, self.bias_k), self._with_added_keys(v, self.bias_v)
            mask = mask if mask is None else pad(mask, (0, added), value=True)
            bias = bias if bias is None else pad(bias, (0, added))
        options = args.CAUSAL if is_causal else args.PLAIN
        if mask is not None or bias is not None:
            options = SoftmaxOptions(mask, bias, is_causal)
        heads, weights = composition.attention(
            q, k, v, options, self.dropout if self.training else 0.0, None, False, need_weights,
            average_weights=need_weights and average_attn_weights,
        )  # fmt: skip
        # (B, H, Lq, D) to the query's own order
        heads = heads.transpose(1, 2) if self.batch_first or not batched else heads.permute(2, 0, 1, 3)
        output = self.out_proj(heads.flatten(2))
        if batched:
            return output, weights
        return output.squeeze(0), None if weights is None else weights.squeeze(0)

    def _nested_self_attention(
        self, x: Tensor, need_weights: bool, average_attn_weights: bool, is_causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        """For the entries of a nested tensor, which is how ``nn.TransformerEncoder`` passes a padded batch on in
        evaluation: it looks at the layers' weights, not at who computes them."""
        if not self.batch_first:
            raise ValueError("query must be a dense tensor where batch_first is False, got a nested one")
        lengths = [entry.shape[0] for entry in x.unbind()]
        padded = x.to_padded_tensor(0.0)
        hidden = torch.arange(padded.shape[1], device=x.device) >= torch.tensor(lengths, device=x.device).unsqueeze(-1)
        output, weights = self.forward(
            padded, padded, padded, hidden, need_weights, None, average_attn_weights, is_causal
        )  # fmt: skip
        entries = [entry[:length] for entry, length in zip(output, lengths, strict=True)]
        if x.layout is torch.jagged:  # with the lengths of x, so that the two can be added
            offsets: Tensor = x.offsets()  # type: ignore[attr-defined]
            return torch.nested.nested_tensor_from_jagged(torch.cat(entries), offsets), weights
        return torch.nested.as_nested_tensor(entries), weights

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        widths = {"query": self.embed_dim, "key": self.kdim, "value": self.vdim}
        dtype = (self.q_proj_weight if self.in_proj_weight is None else self.in_proj_weight).dtype
        for (name, width), x in zip(widths.items(), (query, key, value), strict=True):
            args.check_float_tensor(name, x)
            if x.dim() not in (2, 3) or x.shape[-1] != width:
                batched = "batch, length" if self.batch_first else "length, batch"
                raise ValueError(f"{name} must have shape ({batched}, {width}) or (length, {width}), "
                                 f"got {tuple(x.shape)}")  # fmt: skip
            if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
                raise TypeError(f"{name} must have the dtype of the module, {dtype}, got {x.dtype}")
        for name, x in (("key", key), ("value", value)):
            args.check_dims(name, x, "query", query)
        if value.shape[:-1] != key.shape[:-1]:
            raise ValueError(f"value must have length and batch of key, {tuple(key.shape[:-1])}, "
                             f"got shape {tuple(value.shape)}")  # fmt: skip
        batch = 0 if self.batch_first else 1
        if query.dim() == 3 and key.shape[batch] != query.shape[batch]:
            raise ValueError(f"key must have the batch of query, {query.shape[batch]} in dimension {batch}, "
                             f"got shape {tuple(key.shape)}")  # fmt: skip

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """The input projections, as few products as the inputs that are one and the same tensor allow."""
        packed, bias = self.in_proj_weight, self.in_proj_bias
        if packed is not None and query is key and key is value:
            return linear(query, packed, bias).chunk(3, -1)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        if packed is not None and key is value:
            after_query = self.embed_dim
            kv_bias = None if bias is None else bias[after_query:]
            key_value = linear(key, packed[after_query:], kv_bias).chunk(2, -1)
            return linear(query, packed[:after_query], biases[0]), *key_value
        weights = (
            packed.chunk(3) if packed is not None else (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        )
        return tuple(linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))

    def _heads(self, x: Tensor, batched: bool) -> Tensor:
        """``(B, L, E)``, ``(L, B, E)`` or ``(L, E)`` to ``(B, H, L, E / H)``, a view."""
        split = x.unflatten(-1, (self.num_heads, -1))
        if not batched:
            return split.transpose(0, 1).unsqueeze(0)
        return split.transpose(1, 2) if self.batch_first else split.permute(1, 2, 0, 3)

    def _with_added_keys(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``(B, H, Lk, D)`` with the learned entry ``(1, 1, E)`` and the one of zeros behind it, where there are."""
        if bias is not None:
            learned = bias.to(x.dtype).view(1, self.num_heads, 1, -1).expand(x.shape[0], -1, -1, -1)
            x = torch.cat([x, learned], -2)
        return pad(x, (0, 0, 0, 1)) if self.add_zero_attn else x

    def _masks(
        self,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        q: Tensor,
        k: Tensor,
        batched: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Both masks as one keep-mask and one bias that broadcast to ``(B, H, Lq, Lk)``."""
        batch, queries, keys = q.shape[0], q.shape[-2], k.shape[-2]
        keep = bias = None
        if attn_mask is not None:
            many = batch * self.num_heads
            _check_mask("attn_mask", attn_mask, (queries, keys), (many, queries, keys))
            full = attn_mask if attn_mask.dim() == 2 else attn_mask.unflatten(0, (batch, self.num_heads))
            keep, bias = (~full, None) if full.dtype == torch.bool else (None, full)
        if key_padding_mask is not None:
            _check_mask("key_padding_mask", key_padding_mask, (batch, keys) if batched else (keys,))
            padding = key_padding_mask.view(batch, 1, 1, keys)
            if padding.dtype == torch.bool:
                seen = ~padding
            else:
                # Hidden, not only added: so that hidden keys are left out, and may hold NaN.
                seen = padding != -torch.inf
                bias = padding if bias is None else bias + padding
            keep = seen if keep is None else keep & seen
        return keep, bias


def _check_mask(name: str, mask: object, *shapes: tuple[int, ...]) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(mask).__name__}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"{name} must be bool (True is hidden) or floating point (added), got {mask.dtype}")
    if tuple(mask.shape) not in shapes:
        raise ValueError(f"{name} must have shape {' or '.join(map(str, shapes))}, got {tuple(mask.shape)}")
