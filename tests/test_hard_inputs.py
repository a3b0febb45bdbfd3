"""Inputs that break attention elsewhere: empty rows, NaN behind masks, huge strides, odd dtypes."""

import math

import numpy as np
import pytest
import torch
from cases import DTYPES, Case
from compare import Expected, check_attention
from tolerances import assert_same_bits

import mha_ext

pytestmark = pytest.mark.usefixtures("isa")
BAD = (float("nan"), float("inf"), float("-inf"))
ALL_HIDDEN = {
    "mask": dict(mask=torch.zeros(1, 7, dtype=torch.bool)),
    "float_mask": dict(mask=torch.zeros(5, 7)),
    "causal": dict(is_causal=True, causal_offset=-7),
    "window": dict(window=(0, 0), causal_offset=50),
    "key_lengths": dict(key_lengths=torch.zeros(2, dtype=torch.int64)),
}


def inputs(case):
    query, key, value, options = case.build()
    return {"query": query, "key": key, "value": value}, options


def gradients(tensors, options, through=("output", "weights")):
    leaves = {n: x.detach().clone().requires_grad_() for n, x in tensors.items()}
    results = dict(zip(("output", "weights"), mha_ext.attention(**leaves, **options), strict=True))
    grads = torch.autograd.grad(
        [results[n].sum() for n in through], list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    return results, dict(zip(leaves, grads, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", ALL_HIDDEN)
def test_rows_with_nothing_to_see_are_zero(how, dtype):
    """Output, weights and every gradient are exactly zero; never NaN."""
    tensors, _ = inputs(Case(dtype=dtype))
    tensors["bias"] = torch.randn(5, 7).to(dtype)
    results, grads = gradients(tensors, ALL_HIDDEN[how])
    for name, x in {**results, **grads}.items():
        assert (x == 0).all(), f"{name} {x}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_some_rows_empty(dtype):
    """A causal offset of -2 empties the first two rows only."""
    case = Case(dtype=dtype, is_causal=True, causal_offset=-2, lq=21, lk=19, bias="full", sinks=True, softcap=4.0)
    output, weights, grads = check_attention(case)
    assert (output[..., :2, :] == 0).all()
    assert (weights[..., :2, :] == 0).all()
    assert (grads["query"][..., :2, :] == 0).all()


@pytest.mark.parametrize("value", [-1e9, -1e4, 0.0, 7.0])
def test_finite_mask_value_makes_empty_rows_uniform(value):
    tensors, _ = inputs(Case(lq=3, lk=8))
    output, weights = mha_ext.attention(**tensors, mask=torch.zeros(3, 8), mask_value=value)
    assert torch.equal(weights, torch.full_like(weights, 1 / 8))
    error = (output - tensors["value"].mean(-2, keepdim=True)).abs()
    assert (error <= torch.finfo(torch.float32).eps * tensors["value"].abs().sum(-2, keepdim=True)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sink_with_nothing_to_see(dtype):
    """The sink takes the whole row: weights 0, and no gradient for it since nothing competes."""
    tensors, _ = inputs(Case(dtype=dtype))
    tensors["sinks"] = torch.randn(2).to(dtype)
    results, grads = gradients(tensors, ALL_HIDDEN["mask"])
    for name, x in {**results, **grads}.items():
        assert (x == 0).all(), f"{name} {x}"


HIDING = {
    "mask": dict(mask=(torch.arange(70) < 60).expand(1, 70)),
    "float_mask": dict(mask=(torch.arange(70) < 60).float().expand(9, 70)),
    "key_lengths": dict(key_lengths=torch.tensor([60, 31])),
    "causal": dict(is_causal=True, causal_offset=50),
    "window": dict(window=(3, 1), causal_offset=40),
    "mask_softcap": dict(mask=(torch.arange(70) < 60).expand(1, 70), softcap=2.0),
    "finite_mask_value": dict(mask=(torch.arange(70) < 60).expand(1, 70), mask_value=-1e4),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", HIDING)
def test_hidden_keys_and_values_may_hold_anything(how, dtype, bad):
    """Keys 60.. are hidden and bad: results and gradients are those without them, and their own gradients are zero."""
    case = Case(dtype=dtype, lq=9, lk=70, d=33, dv=17, bias="full")
    tensors, options = inputs(case)
    tensors["key"][..., 60:, :] = bad
    tensors["value"][..., 60:, :] = bad
    options["bias"][..., 60:] = bad
    _, _, grads = Expected(case, tensors, {**options, **HIDING[how]}).check()
    for name in ("key", "value"):
        assert (grads[name][..., 60:, :] == 0).all(), name


@pytest.mark.parametrize("bad", BAD)
def test_a_query_that_sees_nothing_may_hold_anything(bad):
    """Its row is empty: the output row and all gradients are as if it were finite."""
    tensors, _ = inputs(Case(lq=5))
    mask = (torch.arange(5) != 3)[:, None]
    clean_results, clean_grads = gradients(tensors, {"mask": mask})
    tensors["query"][..., 3, :] = bad
    results, grads = gradients(tensors, {"mask": mask})
    for name, x in {**results, **grads}.items():
        assert_same_bits(x, {**clean_results, **clean_grads}[name], name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_a_visible_nan_shows(name, dtype):
    """In the rows that see it and in no other."""
    tensors, _ = inputs(Case(dtype=dtype, lq=40, lk=40, d=16))
    tensors[name][0, 1, 20, 3] = math.nan
    output, weights = mha_ext.attention(**tensors, is_causal=True)
    rows = torch.zeros(2, 2, 40, dtype=torch.bool)
    rows[0, 1, 20 if name == "query" else slice(20, None)] = True
    if name == "query":
        rows[0, 1, 21:] = False
    assert torch.equal(torch.isnan(output).any(-1), rows)
    assert torch.equal(torch.isnan(weights).any(-1), rows & (name != "value"))


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("lq", [1, 9, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_nan_row_does_not_reach_keys_that_it_cannot_see(dtype, lq, create_graph):
    """Their weights are 0, and so are their gradients, in every row and on every route."""
    tensors, _ = inputs(Case(dtype=dtype, lq=lq, lk=40, d=16))
    tensors["query"][..., 0, 3] = math.nan
    mask = torch.arange(40) % 3 != 1
    leaves = [x.requires_grad_() for x in tensors.values()]
    output, weights = mha_ext.attention(*leaves, mask=mask[None])
    hidden = ~mask
    assert torch.isnan(weights[..., 0, mask]).all()
    assert (weights[..., hidden] == 0).all()
    assert (mha_ext.masked_softmax(weights.detach(), mask[None])[..., hidden] == 0).all()
    for upstream in (output.sum(), weights.square().sum(), (output.sum() + weights.sum())):
        grads = torch.autograd.grad(upstream, leaves, create_graph=create_graph, retain_graph=True, allow_unused=True)
        for grad in grads[1:]:
            assert grad is None or (grad[..., hidden, :] == 0).all()


@pytest.mark.parametrize("scale", [0.0, -1.0, -1e-3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale_zero_and_negative_with_causal(scale, dtype):
    check_attention(Case(dtype=dtype, scale=scale, is_causal=True, lq=20, lk=20))


def test_scale_zero_is_a_running_mean():
    tensors, _ = inputs(Case(lq=8, lk=8))
    weights = mha_ext.attention(**tensors, scale=0.0, is_causal=True)[1]
    want = torch.tril(torch.ones(8, 8)) / torch.arange(1, 9)[:, None]
    assert torch.equal(weights, want.expand(2, 2, 8, 8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_offsets_past_32_bits(dtype):
    """Views whose strides pass 2^31 elements, over a storage of that address range but few touched pages."""
    step = 2**31 + 8
    storage = torch.empty(step + 64, dtype=dtype)  # never written as a whole: the system gives pages on first touch
    small = torch.randn(2, 1, 3, 8).to(dtype)
    far = storage.as_strided((2, 1, 3, 8), (step, 8, 8, 1))
    far.copy_(small)
    for got, want in zip(mha_ext.attention(far, far, far), mha_ext.attention(small, small, small), strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("zero", ["rows", "heads", "batch"])
def test_stride_zero_with_a_huge_size_of_one(zero):
    """Size-1 dimensions may carry any stride, even one that would leave the storage."""
    tensors, _ = inputs(Case(batch=(1,), heads=1, lq=1, lk=1))
    dim = {"batch": 0, "heads": 1, "rows": 2}[zero]
    wild = {
        n: x.as_strided(x.shape, [2**62 if d == dim else s for d, s in enumerate(x.stride())])
        for n, x in tensors.items()
    }
    for got, want in zip(mha_ext.attention(**wild), mha_ext.attention(**tensors), strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("big", [2**31, 2**60])
def test_window_sides_of_any_size(big):
    tensors, _ = inputs(Case(lq=6, lk=6))
    want = mha_ext.attention(**tensors, is_causal=True)
    for window in ((big, 0), (big, big)):
        for got, right in zip(mha_ext.attention(**tensors, window=window, is_causal=True), want, strict=True):
            assert_same_bits(got, right)


@pytest.mark.parametrize("offset", [2**31, -(2**31), 2**60, -(2**60)])
def test_causal_offsets_of_any_size(offset):
    tensors, _ = inputs(Case(lq=6, lk=6))
    weights = mha_ext.attention(**tensors, is_causal=True, causal_offset=offset)[1]
    want = mha_ext.attention(**tensors)[1] if offset > 0 else torch.zeros_like(weights)
    assert_same_bits(weights, want)


def test_key_lengths_past_the_end_hide_nothing():
    tensors, _ = inputs(Case())
    got = mha_ext.attention(**tensors, key_lengths=torch.tensor([7, 2**40]))[1]
    assert_same_bits(got, mha_ext.attention(**tensors)[1])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.int16], ids=str)
def test_lengths_and_offsets_of_any_integer_dtype(dtype):
    tensors, _ = inputs(Case(lq=6, lk=6))
    got = mha_ext.attention(
        **tensors,
        is_causal=True,
        causal_offset=torch.tensor([1, 2]).to(dtype),
        key_lengths=torch.tensor([3, 6]).to(dtype),
    )[1]
    want = mha_ext.attention(
        **tensors, is_causal=True, causal_offset=torch.tensor([1, 2]), key_lengths=torch.tensor([3, 6])
    )[1]
    assert_same_bits(got, want)


@pytest.mark.parametrize("lk", [7, 70])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_of_minus_infinity_hides(dtype, lk):
    """As an additive mask does elsewhere; a row of nothing but -inf is an empty row."""
    case = Case(dtype=dtype, lk=lk, bias="full")
    tensors, options = inputs(case)
    options["bias"][..., ::2] = -math.inf
    options["bias"][..., 1, :] = -math.inf
    output, weights = mha_ext.attention(**tensors, **options)
    masked = mha_ext.attention(
        **tensors, bias=torch.nan_to_num(options["bias"], neginf=0.0), mask=options["bias"] != -math.inf
    )
    assert_same_bits(output, masked[0])
    assert_same_bits(weights, masked[1])
    results, grads = gradients({**tensors, "bias": options["bias"]}, {})
    assert all(torch.isfinite(x).all() for x in (*results.values(), *grads.values()))


def autocast_like_sdpa(tensors, **options):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.nn.functional.scaled_dot_product_attention(*tensors.values(), **options).dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_autocast_follows_sdpa(dtype):
    tensors, _ = inputs(Case(dtype=dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, weights = mha_ext.attention(**tensors)
        twin = mha_ext.scaled_dot_product_attention(*tensors.values())
    assert output.dtype == weights.dtype == twin.dtype == autocast_like_sdpa(tensors)
    by_hand = mha_ext.attention(**{n: x.to(output.dtype) for n, x in tensors.items()})
    assert_same_bits(output, by_hand[0])
    assert_same_bits(weights, by_hand[1])


def test_autocast_casts_every_float_input_and_returns_gradients_in_their_own_dtype():
    case = Case(bias="heads", sinks=True)
    tensors, options = inputs(case)
    leaves = {**tensors, **options}
    leaves = {n: x.requires_grad_() for n, x in leaves.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = mha_ext.attention(**leaves)
    assert output.dtype == torch.bfloat16
    grads = torch.autograd.grad(output.float().sum(), list(leaves.values()))
    assert [g.dtype for g in grads] == [torch.float32] * 5


def test_autocast_brings_mixed_dtypes_together():
    tensors, _ = inputs(Case())
    tensors["value"] = tensors["value"].half()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert mha_ext.attention(**tensors)[0].dtype == autocast_like_sdpa(tensors) == torch.bfloat16


def test_inputs_are_left_alone():
    case = Case(
        mask="full", bias="full", sinks=True, key_lengths=True, causal_offset="tensor", is_causal=True, dropout=0.5
    )
    tensors, options = inputs(case)
    everything = {**tensors, **options}
    before = {n: x.clone() for n, x in everything.items() if torch.is_tensor(x)}
    mha_ext.attention(**everything, dropout=0.5)
    for name, x in before.items():
        assert torch.equal(everything[name], x), name


@pytest.mark.parametrize("offset", [2**63 - 1, -(2**63)])
@pytest.mark.parametrize("window", [None, (3, None), (None, 3)], ids=str)
def test_causal_offset_tensors_at_the_end_of_64_bits(window, offset):
    """No position wraps round: past every key all is visible (or left of the window), before the first nothing."""
    tensors, _ = inputs(Case(lq=6, lk=6))
    options = dict(is_causal=True, window=window, causal_offset=torch.tensor([offset, 0]))
    results, grads = gradients(tensors, options)
    # Without gradients few queries go another way, which rounds differently.
    first, second = (
        {n: x[part].clone().requires_grad_() for n, x in tensors.items()} for part in (slice(1), slice(1, 2))
    )
    if offset > 0 and window != (3, None):
        want = mha_ext.attention(**first)
    else:
        want = [torch.zeros_like(x[:1]) for x in results.values()]
    for name, right in zip(("output", "weights"), want, strict=True):
        assert_same_bits(results[name][:1].contiguous(), right, name)
    usual = mha_ext.attention(**second, is_causal=True, window=window)
    assert_same_bits(results["weights"][1:].contiguous(), usual[1])
    assert all(torch.isfinite(g).all() for g in grads.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_padding_may_hold_nan(dtype):
    """Keys and values past key_lengths, NaN or clean, give the same bits everywhere, at a size with several tiles."""
    case = Case(dtype=dtype, heads=2, lq=70, lk=150, d=40, dv=72)
    tensors, _ = inputs(case)
    lengths = torch.tensor([131, 64])
    padded = (torch.arange(150) >= lengths[:, None])[:, None, :, None]
    spoilt = {**tensors, **{n: tensors[n].masked_fill(padded, math.nan) for n in ("key", "value")}}
    clean, dirty = (gradients(x, {"key_lengths": lengths}) for x in (tensors, spoilt))
    for name in ("output", "weights"):
        assert_same_bits(dirty[0][name], clean[0][name], name)
    for name in tensors:
        assert_same_bits(dirty[1][name], clean[1][name], f"gradient of {name}")


def test_the_steps_under_autocast_take_what_attention_takes():
    """Scores come out in the autocast dtype; a float32 bias (or sinks) is cast there too, as attention() does it."""
    tensors, options = inputs(Case(bias="heads", sinks=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, weights = mha_ext.attention(**tensors, **options)
        by_steps = mha_ext.masked_softmax(mha_ext.attention_scores(tensors["query"], tensors["key"]), **options)
        summed = mha_ext.weighted_sum(by_steps, tensors["value"])
    rounded = [{n: x.bfloat16() for n, x in group.items()} for group in (tensors, options)]
    right = Expected(Case(dtype=torch.bfloat16), *rounded, with_grads=False)
    for n, name in enumerate(("output", "weights")):
        for got in ((output, weights), (summed, by_steps)):
            right.same(name, got[n], right.want[n], right.plain[n])


def test_numpy_integers_are_integers():
    tensors, _ = inputs(Case(lq=6, lk=6))
    got = mha_ext.attention(**tensors, window=(np.int64(2), np.int32(1)), causal_offset=np.int64(1))[1]
    assert_same_bits(got, mha_ext.attention(**tensors, window=(2, 1), causal_offset=1)[1])
