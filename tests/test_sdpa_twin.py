"""scaled_dot_product_attention: torch's signature, torch's values and gradients over its options."""

import inspect
import re

import cases
import oracle
import pytest
import torch
from cases import Case
from compare import Expected, expected, run
from tolerances import assert_rounding_only
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as theirs

import mha_ext

pytestmark = pytest.mark.usefixtures("isa")
ours = mha_ext.scaled_dot_product_attention


def documented_signature():
    """torch's function is a builtin without a signature; the first line of its documentation has it."""
    line = re.match(r"scaled_dot_product_attention\((.*?)\)\s*->", theirs.__doc__.replace("\n", " ").strip()).group(1)
    namespace = {}
    exec(f"def documented({line}): pass", namespace)
    return inspect.signature(namespace["documented"])


def test_signature():
    def bare(signature):
        return [(p.name, p.kind, p.default) for p in signature.parameters.values()]

    assert bare(inspect.signature(ours)) == bare(documented_signature())


MASKS = ("none", "bool", "bool_per_key", "float", "float_minus_inf", "float_per_key")
ROWS = cases.pairwise(
    mask=MASKS,
    is_causal=(False, True),
    scale=(None, 0.3, -0.4),
    kv_heads=(None, 2),
    dv=(8, 5),
    layout=("contiguous", "blhd", "expanded"),
    batch=((2,), (1,), (2, 2)),
    lk=(7, 5, 1),
)


def build(row, dtype=torch.float64):
    case = Case(dtype=dtype, heads=4, **{n: row[n] for n in ("kv_heads", "dv", "layout", "batch", "lk", "scale")})
    query, key, value, _ = case.build()
    shape = case.broadcast_shape("per_key" if row["mask"].endswith("per_key") else "full")
    bits = torch.rand(shape, generator=case.generator("bits")) < 0.7
    bits[..., 0] = True
    kind = row["mask"].removesuffix("_per_key")
    mask = {
        "none": None,
        "bool": bits,
        "float": case.randn("attn_mask", shape),
        "float_minus_inf": torch.zeros(shape, dtype=dtype).masked_fill(~bits, float("-inf")),
    }[kind]
    options = {"is_causal": row["is_causal"], "scale": row["scale"], "enable_gqa": row["kv_heads"] is not None}
    return query, key, value, mask, options


def gradients(function, query, key, value, mask, options):
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    if mask is not None and mask.is_floating_point():
        mask = mask.detach().requires_grad_()
        leaves.append(mask)
    output = function(*leaves[:3], mask, **options)
    return output, *torch.autograd.grad(output.sin().sum(), leaves)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: ",".join(f"{k}={v}" for k, v in row.items()).replace(" ", ""))
def test_same_values_and_gradients(row):
    """Where torch refuses a mask together with is_causal, the mask that says both stands in for it."""
    query, key, value, mask, options = build(row)
    torch_mask, torch_options = mask, dict(options)
    if mask is not None and options["is_causal"]:
        causal = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
        minus_inf = torch.zeros(causal.shape, dtype=torch.float64).masked_fill(~causal, float("-inf"))
        torch_mask = mask & causal if mask.dtype == torch.bool else mask + minus_inf
        torch_options["is_causal"] = False
    got = gradients(ours, query, key, value, mask, options)
    want = gradients(theirs, query, key, value, torch_mask, torch_options)
    assert_rounding_only(got[0], want[0], (query, key, value), "output")
    assert_rounding_only(got[1:4], want[1:4], (query, key, value), "gradients")
    if torch_mask is mask and mask is not None and mask.is_floating_point():
        assert_rounding_only(got[4], want[4], (query, key, value), "gradient of attn_mask")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_low_precision(dtype):
    """By the tolerance rule, against the float64 oracle."""
    case = Case(dtype=dtype, is_causal=True, lq=40, lk=40, d=32)
    query, key, value, _ = case.build()
    right = expected(case, through_weights=False)
    got = run(
        lambda q, k, v: (ours(q, k, v, is_causal=True), None),
        {"query": query, "key": key, "value": value},
        {},
        right.grads,
    )
    right.same("output", got[0], right.want[0], right.plain[0])
    for name in ("query", "key", "value"):
        right.same(name, got[2][name], right.want[2][name], right.plain[2][name])


def test_positional_arguments():
    query, key, value, _ = Case(dtype=torch.float64, lk=5).build()
    mask = torch.randn(5, 5, dtype=torch.float64)
    assert_rounding_only(
        ours(query, key, value, mask, 0.0, False, 0.5, False),
        theirs(query, key, value, mask, 0.0, False, scale=0.5),
        (query, key, value),
    )


def test_rows_of_minus_infinity_give_zero_as_torch_does():
    query, key, value, _ = Case(dtype=torch.float64).build()
    mask = torch.zeros(5, 7, dtype=torch.float64)
    mask[2] = float("-inf")
    got, want = ours(query, key, value, mask), theirs(query, key, value, mask)
    assert_rounding_only(got, want, (query, key, value))
    assert (got[..., 2, :] == 0).all()


def test_batch_dimensions_broadcast_as_in_torch():
    query, key, value, _ = Case(dtype=torch.float64, batch=(3,)).build()
    assert_rounding_only(ours(query, key[:1], value[:1]), theirs(query, key[:1], value[:1]), (query, key, value))
    assert_rounding_only(ours(query[:1], key, value[:1]), theirs(query[:1], key, value[:1]), (query, key, value))


def test_dropout_follows_the_seed():
    query, key, value, _ = Case(lq=20, lk=20).build()
    torch.manual_seed(1)
    first = ours(query, key, value, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(ours(query, key, value, dropout_p=0.5), first)
    assert not torch.equal(ours(query, key, value, dropout_p=0.5), first)
    assert (ours(query, key, value, dropout_p=1.0) == 0).all()


def test_swapping_torch_for_it_in_a_model(monkeypatch):
    """A torch layer that calls F.scaled_dot_product_attention gives the same with ours in its place."""
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    want = layer(x)
    calls = []

    def counting(*args, **kwargs):
        calls.append(1)
        return ours(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counting)
    assert_rounding_only(layer(x), want, (x, *layer.parameters()))
    assert calls


def same_as_torch(query, key, value, mask=None, **options):
    """Where both take a call, the results differ by rounding alone."""
    got, want = (f(query, key, value, mask, **options) for f in (ours, theirs))
    assert_rounding_only(got, want, (query, key, value))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float32_mask_with_a_low_precision_query(dtype):
    """The oracle adds the float32 numbers: rounding them to the query's dtype is one of the roundings allowed for."""
    case = Case(dtype=dtype, lq=20, lk=30)
    query, key, value, _ = case.build()
    mask = torch.randn(20, 30)
    right = Expected(case, {"query": query, "key": key, "value": value}, {"bias": mask.to(dtype)}, with_grads=False)
    got = ours(query, key, value, mask)
    assert theirs(query, key, value, mask).dtype == got.dtype == dtype
    right.same("output", got, oracle.attention(query, key, value, bias=mask)[0], right.plain[0])


HEADS = {
    "key_and_value": (4, 1, 1, False),
    "key_alone": (4, 1, 4, False),
    "value_alone": (4, 4, 1, False),
    "query": (1, 4, 4, False),
    "grouped_key_2_value_1": (4, 2, 1, True),
    "grouped_key_1_value_2": (4, 1, 2, True),
    "grouped_key_2_value_4": (4, 2, 4, True),
}


@pytest.mark.parametrize(("heads", "key_heads", "value_heads", "gqa"), HEADS.values(), ids=HEADS)
def test_head_counts_that_torch_takes(heads, key_heads, value_heads, gqa):
    """A head dimension of 1 broadcasts; under enable_gqa key and value may be grouped differently."""
    query, key, value = (
        torch.randn(2, h, length, 8, dtype=torch.float64)
        for h, length in ((heads, 5), (key_heads, 7), (value_heads, 7))
    )
    options = {"is_causal": True, "enable_gqa": gqa}
    got, want = (gradients(f, query, key, value, None, options) for f in (ours, theirs))
    assert_rounding_only(got, want, (query, key, value))


@pytest.mark.parametrize("scale", [torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64), torch.tensor(2)], ids=str)
def test_scale_as_a_tensor_of_no_dimensions(scale):
    query, key, value, _ = Case(dtype=torch.float64).build()
    same_as_torch(query, key, value, scale=scale)


@pytest.mark.parametrize(
    ("query", "key"),
    [((6, 5, 8), (3, 9, 8)), ((6, 5, 8), (6, 9, 8)), ((3, 2, 4, 9, 8), (2, 2, 5, 8)), ((2, 4, 5, 8), (2, 9, 8))],
    ids=str,
)
def test_grouped_heads_in_any_number_of_dimensions(query, key):
    """The third dimension from the end counts heads, missing ones in front broadcast."""
    q, (k, v) = torch.randn(query), (torch.randn(key) for _ in range(2))
    want = theirs(q, k, v, enable_gqa=True)
    torch.testing.assert_close(mha_ext.scaled_dot_product_attention(q, k, v, enable_gqa=True), want)


@pytest.mark.parametrize(
    "bias", [causal_lower_right(5, 17), causal_upper_left(5, 17)], ids=["lower right", "upper left"]
)
def test_causal_bias(bias):
    query, key = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 17, 8)
    torch.testing.assert_close(ours(query, key, key, bias), theirs(query, key, key, bias))
    with pytest.raises(ValueError, match=r"^attn_mask must not be a CausalBias where is_causal is True$"):
        ours(query, key, key, bias, is_causal=True)
    for name in ("mask", "bias"):
        with pytest.raises(TypeError, match=f"^{name} must be a tensor with values, got a CausalBias"):
            mha_ext.attention(query, key, key, **{name: bias})
