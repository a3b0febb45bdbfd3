"""Cases: one attention call each, described by a few words, built from a fixed seed."""

import dataclasses
import itertools
import math
import random
import zlib

import oracle
import torch

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MASKS = (None, "full", "per_key", "per_query", "shared", "float", "int64", "one", "own_dtype")
BIASES = (None, "full", "heads", "per_key", "per_query", "one")
LAYOUTS = ("contiguous", "blhd", "permuted", "expanded", "strided")


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes and options of one call. `batch` holds the leading dims; heads=None: no head dimension."""

    dtype: torch.dtype = torch.float32
    batch: tuple = (2,)
    heads: int | None = 2
    kv_heads: int | None = None
    lq: int = 5
    lk: int = 7
    d: int = 8
    dv: int | None = None
    mask: str | None = None
    bias: str | None = None
    is_causal: bool = False
    window: tuple | None = None
    causal_offset: object = None
    key_lengths: bool = False
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    mask_value: float = -math.inf
    dropout: float = 0.0
    layout: str = "contiguous"
    seed: int = 0

    def __str__(self):
        """The fields that differ from the defaults: also the test's id."""
        changed = [f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        words = [f"{f.name}={str(getattr(self, f.name)).removeprefix('torch.')}" for f in changed]
        return ",".join(words).replace(" ", "") or "defaults"

    def shape(self, length, size, kv=False):
        heads = self.kv_heads if kv and self.kv_heads is not None else self.heads
        return (*self.batch, *(() if self.heads is None else (heads,)), length, size)

    @property
    def score_shape(self):
        return self.shape(self.lq, self.lk)

    @property
    def longest_sum(self):
        """Terms of the longest sum in forward or backward: over D, Dv, the keys, or for a bias all queries."""
        return max(1, self.d, self.dv or 0, self.lk, math.prod(self.shape(self.lq, 1)))

    def generator(self, what):
        return torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {what}".encode()))

    def randn(self, what, shape):
        """Normal numbers that the dtype holds exactly; the same for any dtype up to rounding."""
        return torch.randn(shape, generator=self.generator(what), dtype=torch.float64).to(self.dtype)

    def tensor(self, what, shape):
        return lay_out(self.randn(what, shape), self.layout, has_heads=self.heads is not None)

    def build(self):
        """(query, key, value, keyword arguments of mha_ext.attention except dropout)."""
        query = self.tensor("query", self.shape(self.lq, self.d))
        key = self.tensor("key", self.shape(self.lk, self.d, kv=True))
        value = self.tensor("value", self.shape(self.lk, self.d if self.dv is None else self.dv, kv=True))
        return query, key, value, self.options()

    def options(self):
        options = {}
        for name in ("is_causal", "window", "causal_offset", "scale", "softcap", "mask_value"):
            if getattr(self, name) != getattr(Case, name):
                options[name] = getattr(self, name)
        if self.causal_offset == "tensor":
            options["causal_offset"] = self.integers("causal_offset", -2, self.lk - self.lq + 3)
        if self.key_lengths:
            options["key_lengths"] = self.integers("key_lengths", 0, self.lk + 1)
        if self.mask is not None:
            options["mask"] = self.build_mask()
        if self.bias is not None:
            options["bias"] = self.randn("bias", self.broadcast_shape(self.bias))
        if self.sinks:
            options["sinks"] = self.randn("sinks", (1 if self.heads is None else self.heads,))
        if self.kv_heads is not None:
            options["enable_gqa"] = True
        return options

    def integers(self, what, low, high):
        return torch.randint(low, max(low + 1, high), self.batch, generator=self.generator(what))

    def broadcast_shape(self, kind):
        full = self.score_shape
        if kind == "per_key":
            return tuple(1 if 0 < axis < len(full) - 1 else n for axis, n in enumerate(full))
        if kind == "per_query":
            return (*full[:-1], 1)
        if kind == "heads":
            return full if self.heads is None else full[-3:]
        return {"one": (1,), "shared": full[-2:]}.get(kind, full)

    def build_mask(self):
        kept = torch.rand(self.broadcast_shape(self.mask), generator=self.generator("mask")) < (
            1 if self.mask == "one" else 0.7
        )
        if self.mask == "float":
            return kept.float()
        if self.mask == "int64":
            return kept.long() * -3  # any non-zero integer means "may attend"
        return kept.to(self.dtype) if self.mask == "own_dtype" else kept

    def keep(self, seed):
        """The dropout keep-mask that belongs to `seed`."""
        shape = oracle.as_heads(torch.empty(self.score_shape, device="meta")).shape
        return oracle.keep_mask(seed, self.dropout, tuple(shape))


def lay_out(x, layout, has_heads=True):
    """The same values (for "expanded": a batch of equal entries) behind other strides."""
    if layout == "permuted":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "blhd" and has_heads:
        return x.transpose(-2, -3).contiguous().transpose(-2, -3)
    if layout == "expanded" and x.dim() > 2:
        return x[:1].expand(x.shape)
    if layout == "strided":
        return x.repeat_interleave(2, dim=-1)[..., ::2]
    return x


def pairwise(seed=0, **axes):
    """Few combinations of the axes' values such that every pair of values of two axes occurs (greedy)."""
    rng = random.Random(seed)
    names = list(axes)
    index = {name: range(len(values)) for name, values in axes.items()}
    missing = {(a, i, b, j) for a, b in itertools.combinations(names, 2) for i in index[a] for j in index[b]}

    def pairs(row):
        return {(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)}

    rows = []
    while missing:
        a, i, b, j = min(missing)
        draws = [{n: rng.choice(index[n]) for n in names} | {a: i, b: j} for _ in range(20)]
        best = max(draws, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        rows.append({n: axes[n][k] for n, k in best.items()})
    return rows
