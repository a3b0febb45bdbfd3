"""mha_ext.attention against the float64 oracle: options, dtypes, layouts; values and gradients; on every ISA level."""

import cases
import pytest
import torch
from cases import Case
from compare import check_attention

import mha_ext

pytestmark = pytest.mark.usefixtures("isa")

# Odd lengths on both sides of tile edges; head sizes around vector widths; value head sizes that differ.
SIZES = (
    dict(lq=1, lk=1, d=1),
    dict(lq=1, lk=65, d=64),
    dict(lq=17, lk=1, d=3),
    dict(lq=17, lk=63, d=31),
    dict(lq=63, lk=17, d=8, dv=3),
    dict(lq=65, lk=65, d=65),
    dict(lq=5, lk=7, d=128, dv=64),
    dict(lq=3, lk=33, d=256, dv=1),
)
OPTIONS = cases.pairwise(
    dtype=cases.DTYPES,
    size=SIZES,
    mask=cases.MASKS,
    bias=cases.BIASES,
    is_causal=(False, True),
    window=(None, (3, 0), (None, 2), (2, None), (0, 0)),
    causal_offset=(None, 2, "tensor", "lower_right"),
    key_lengths=(False, True),
    scale=(None, 0.3, -0.5, 0.0),
    softcap=(None, 1.5),
    sinks=(False, True),
    mask_value=(float("-inf"), -1e9, -3.0),
    dropout=(0.0, 0.25),
    kv_heads=(None, 1),
    layout=cases.LAYOUTS,
)


def as_case(row):
    row = dict(row)
    if row["dtype"] == torch.float16 and row["mask_value"] == -1e9:
        row["mask_value"] = -3e4  # float16 holds nothing below -65504
    return Case(**row.pop("size"), **row, heads=2)


@pytest.mark.parametrize("case", [as_case(row) for row in OPTIONS], ids=str)
def test_any_options(case):
    check_attention(case)


LONG = cases.pairwise(
    dtype=cases.DTYPES,
    size=(dict(lq=197, lk=197, d=64), dict(lq=257, lk=65, d=31), dict(lq=63, lk=257, d=64, dv=65)),
    options=(
        {},
        dict(is_causal=True),
        dict(mask="per_key", bias="heads"),
        dict(window=(31, 0), softcap=3.0, sinks=True),
    ),
)


@pytest.mark.parametrize(
    "case", [Case(**r["size"], **r["options"], dtype=r["dtype"], batch=(1,)) for r in LONG], ids=str
)
def test_long(case):
    check_attention(case)


LEADING = ((None, ()), (None, (3,)), (2, (3,)), (2, (2, 1)), (2, (2, 3, 1)))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "batch"), LEADING, ids=str)
def test_leading_dimensions(heads, batch, dtype):
    """2-D (L, D) and 3-D (B, L, D) inputs have no head dimension; anything above is (..., H, L, D)."""
    check_attention(Case(dtype=dtype, batch=batch, heads=heads, mask="full", bias="heads", is_causal=True, dropout=0.3))


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_grouped_heads(kv_heads):
    check_attention(Case(heads=6, kv_heads=kv_heads, mask="full", bias="full", sinks=True, layout="blhd"))


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_layouts(layout, dtype):
    check_attention(Case(layout=layout, dtype=dtype, batch=(3,), lq=19, lk=33, d=24, kv_heads=1))


ZERO_SIZES = (
    dict(batch=(0,)),
    dict(heads=0),
    dict(lq=0),
    dict(lk=0),
    dict(d=0),
    dict(dv=0),
    dict(lq=0, lk=0),
    dict(d=0, dv=0),
)


@pytest.mark.parametrize(
    "options", [{}, dict(mask="full", bias="full", is_causal=True, sinks=True)], ids=("plain", "all")
)
@pytest.mark.parametrize("sizes", ZERO_SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_zero_sizes(dtype, sizes, options):
    check_attention(Case(dtype=dtype, **sizes, **options))


def test_one_of_everything():
    check_attention(Case(batch=(1,), heads=1, lq=1, lk=1, d=1))


@pytest.mark.parametrize("case", [as_case(row) for row in OPTIONS[::6]], ids=str)
def test_without_weights(case):
    """need_weights=False returns None for the weights and the same output and gradients."""
    check_attention(case, need_weights=False)


@pytest.mark.parametrize("name", ["query", "key", "value", "bias", "sinks"])
def test_one_gradient_at_a_time(name):
    """A gradient for one input alone is the gradient one gets when all are wanted."""
    case = Case(mask="full", bias="heads", sinks=True, softcap=2.0)
    query, key, value, options = case.build()
    inputs = {"query": query, "key": key, "value": value, "bias": options.pop("bias"), "sinks": options.pop("sinks")}

    def gradient(wanted):
        leaves = {n: x.detach().requires_grad_(n in wanted) for n, x in inputs.items()}
        output, weights = mha_ext.attention(**leaves, **options)
        return torch.autograd.grad((output.square().sum() + weights.square().sum()), [leaves[n] for n in wanted])

    alone, together = gradient([name])[0], gradient(list(inputs))[list(inputs).index(name)]
    assert torch.equal(alone, together)
