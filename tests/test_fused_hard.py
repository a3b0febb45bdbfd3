"""Hard inputs through the fused operator without weights, where no matrix of scores exists: NaN behind masks and empty
rows; and how results are laid out in memory."""

import math

import cases
import pytest
import torch
from cases import Case, lay_out
from tolerances import assert_rounding_only, assert_same_bits

import mha_ext

BAD = (float("nan"), float("inf"), float("-inf"))
LK = 150  # three blocks of keys, the last not full
VISIBLE = 131
HIDING = {
    "mask": dict(mask=(torch.arange(LK) < VISIBLE).expand(1, LK)),
    "mask_full": dict(mask=(torch.arange(LK) < VISIBLE).expand(2, 2, 70, LK).contiguous()),
    "key_lengths": dict(key_lengths=torch.tensor([VISIBLE, 64])),
    "causal": dict(is_causal=True, causal_offset=VISIBLE - 70),
    "window": dict(window=(33, 2), causal_offset=VISIBLE - 72),
    "softcap": dict(mask=(torch.arange(LK) < VISIBLE).expand(1, LK), softcap=2.0),
    "sinks": dict(mask=(torch.arange(LK) < VISIBLE).expand(1, LK), sinks=torch.tensor([0.5, -1.0])),
    "dropout": dict(key_lengths=torch.tensor([VISIBLE, 64]), dropout=0.3),
}


def gradients(tensors, options):
    """Output and gradients of a call without weights."""
    leaves = {n: x.detach().clone().requires_grad_() for n, x in tensors.items()}
    torch.manual_seed(1)
    output, _ = mha_ext.attention(**leaves, **options, need_weights=False)
    grads = torch.autograd.grad(output.square().sum(), list(leaves.values()), allow_unused=True, materialize_grads=True)
    return {"output": output.detach(), **dict(zip(leaves, grads, strict=True))}


def inputs(case):
    query, key, value, _ = case.build()
    return {"query": query, "key": key, "value": value}


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("how", HIDING)
def test_hidden_keys_and_values_may_hold_anything(how, dtype, bad):
    """The same bits as with zeros there, gradients included; their own gradients are 0."""
    options = {n: x.to(dtype) if n == "sinks" else x for n, x in HIDING[how].items()}
    tensors = inputs(Case(dtype=dtype, lq=70, lk=LK, d=40, dv=24))
    tensors["bias"] = torch.randn(1, 2, 1, LK).to(dtype)
    clean, spoilt = ({n: x.clone() for n, x in tensors.items()} for _ in range(2))
    for n in ("key", "value"):
        clean[n][..., VISIBLE:, :], spoilt[n][..., VISIBLE:, :] = 0, bad
    clean["bias"][..., VISIBLE:], spoilt["bias"][..., VISIBLE:] = 0, bad
    want, got = gradients(clean, options), gradients(spoilt, options)
    for name in want:
        assert_same_bits(got[name], want[name], f"{how}: {name}")
    for name in ("key", "value"):
        assert (got[name][..., VISIBLE:, :] == 0).all()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_a_query_that_sees_nothing_may_hold_anything(dtype, bad):
    """Query, and what comes back for its output, in rows that are empty: no trace in any result."""
    tensors = inputs(Case(dtype=dtype, lq=70, lk=90, d=40))
    options = {"mask": (torch.arange(70) % 7 != 3)[:, None]}
    leaves = [x.requires_grad_() for x in tensors.values()]
    spoilt = tensors["query"].detach().clone()
    spoilt[..., 3::7, :] = bad
    upstream = torch.randn(2, 2, 70, 40).to(dtype)
    dirty_upstream = upstream.clone()
    dirty_upstream[..., 3::7, :] = bad
    want = mha_ext.attention(*leaves, **options, need_weights=False)[0]
    leaves_dirty = [spoilt.requires_grad_(), *leaves[1:]]
    got = mha_ext.attention(*leaves_dirty, **options, need_weights=False)[0]
    assert_same_bits(got, want)
    assert (got[..., 3::7, :] == 0).all()
    for a, b in zip(
        torch.autograd.grad(got, leaves_dirty, dirty_upstream), torch.autograd.grad(want, leaves, upstream), strict=True
    ):
        assert_same_bits(a, b)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_a_visible_nan_shows(name, dtype):
    """In the rows that see it and in no other."""
    tensors = inputs(Case(dtype=dtype, lq=70, lk=70, d=16))
    tensors[name][0, 1, 20, 3] = math.nan
    output, _ = mha_ext.attention(**tensors, is_causal=True, need_weights=False)
    rows = torch.zeros(2, 2, 70, dtype=torch.bool)
    rows[0, 1, slice(20, 21) if name == "query" else slice(20, None)] = True
    assert torch.equal(torch.isnan(output).any(-1), rows)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_with_nothing_to_see(dtype, sinks):
    """Output and gradients exactly 0, whole calls and single rows."""
    tensors = inputs(Case(dtype=dtype, lq=70, lk=90, d=24))
    if sinks:
        tensors["sinks"] = torch.randn(2).to(dtype)
    for options in (
        {"mask": torch.zeros(1, 90, dtype=torch.bool)},
        {"key_lengths": torch.zeros(2, dtype=torch.int64)},
        {"is_causal": True, "causal_offset": -70},
        {"bias": torch.full((70, 90), -math.inf).to(dtype)},
    ):
        for name, x in gradients(tensors, options).items():
            assert (x == 0).all(), f"{name}, {options}"
    got = gradients(tensors, {"is_causal": True, "causal_offset": -30})
    assert (got["output"][..., :30, :] == 0).all()
    assert (got["query"][..., :30, :] == 0).all()
    assert (got["output"][..., 30:, :] != 0).all()


LAYOUTS = ("contiguous", "blhd", "permuted", "strided")


def heads_inside(x):
    return x.transpose(-2, -3).is_contiguous()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_follow_the_layout_of_the_inputs(layout):
    """(B, L, H, D) views give an output and gradients of that layout; everything else is contiguous."""
    case = Case(batch=(2,), heads=4, kv_heads=2, lq=5, lk=7, d=8, dv=6)
    tensors = {n: lay_out(x, layout).requires_grad_() for n, x in inputs(case).items()}
    output, weights = mha_ext.attention(**tensors, enable_gqa=True)
    grads = torch.autograd.grad(output.sum() + weights.square().sum(), list(tensors.values()))
    for x in (output, *grads):
        assert heads_inside(x) if layout == "blhd" else x.is_contiguous()
    assert weights.is_contiguous()


def test_each_gradient_follows_its_own_input():
    case = Case(batch=(2,), heads=4, lq=5, lk=7)
    query, key, value, _ = case.build()
    leaves = [x.requires_grad_() for x in (query, lay_out(key, "blhd"), value)]
    output, _ = mha_ext.attention(*leaves)
    assert output.is_contiguous()
    for grad, inside in zip(torch.autograd.grad(output.sum(), leaves), (False, True, False), strict=True):
        assert heads_inside(grad) == inside


@pytest.mark.parametrize("shape", [(2, 1, 5, 8), (2, 4, 1, 8), (1, 1, 1, 1)], ids=str)
def test_a_single_head_or_query_has_one_layout(shape):
    batch, heads, length, size = shape
    query = torch.randn(batch, length, heads, size).transpose(1, 2)
    assert mha_ext.attention(query, query, query)[0].is_contiguous()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("layout", ["blhd", "permuted", "strided"])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_bits_do_not_depend_on_the_layout(layout, dtype):
    """Whatever the strides, forward and backward give the bits of contiguous inputs."""
    tensors = inputs(Case(dtype=dtype, batch=(2,), heads=4, lq=70, lk=90, d=40, dv=24))
    want = gradients(tensors, {"is_causal": True})
    leaves = {n: lay_out(x, layout).requires_grad_() for n, x in tensors.items()}
    output, _ = mha_ext.attention(**leaves, is_causal=True, need_weights=False)
    grads = torch.autograd.grad(output.square().sum(), list(leaves.values()))
    assert_same_bits(output, want["output"])
    for name, grad in zip(leaves, grads, strict=True):
        assert_same_bits(grad, want[name], name)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("layout", ["contiguous", "keys", "strided"])
@pytest.mark.parametrize("lq", [2, 70])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_any_byte_but_0_shows_a_key(dtype, lq, layout):
    """Bytes seen as bool may hold more than 0 and 1. The bits of a clean mask's results, with every step and kernel."""
    shown = torch.tensor([0, 1, 2, 128, 255], dtype=torch.uint8)[torch.randint(0, 5, (2, lq, 160))].view(torch.bool)
    odd = {"contiguous": shown, "keys": shown[:1, :1], "strided": shown.repeat_interleave(2, -1)[..., ::2]}[layout]
    clean = (odd.view(torch.uint8) != 0).contiguous()
    query, key, value, bias = (torch.randn(2, n, d).to(dtype) for n, d in ((lq, 24), (160, 24), (160, 16), (lq, 160)))
    by_steps = {"dropout": lambda weights: weights}
    for extra in ({}, {"bias": bias}, {"bias": bias, "softcap": 3.0}):
        want, got = ({} for _ in range(2))
        for results, mask in ((want, clean), (got, odd)):
            results |= gradients({"query": query, "key": key, "value": value}, {**extra, "mask": mask})
            for way in ({}, by_steps):
                output, weights = mha_ext.attention(query, key, value, mask=mask, **extra, **way)
                results |= {f"output {list(way)}": output, f"weights {list(way)}": weights}
        for name in want:
            assert_same_bits(got[name], want[name], f"{name} with {list(extra)}")


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("lq", [1, 3, 40])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_weights_of_a_batch_entry_that_sees_no_key(lq, dtype):
    """Every element is written, with few queries as with many: the memory of the result is not new."""
    query, key = (torch.randn(2, 2, n, 8).to(dtype) for n in (lq, 5))
    hidden = [dict(key_lengths=torch.tensor([5, 0])), dict(window=(None, -1 - lq - 5))]
    for options in hidden:
        dirt = [torch.full((2, 2, lq, 5), float("nan"), dtype=dtype) for _ in range(8)]
        del dirt  # for the allocator to hand out again
        output, weights = mha_ext.attention(query, key, key, **options)
        for name, x in (("output", output), ("weights", weights)):
            assert (x[1] == 0).all(), f"{name} with {options}: {x[1]}"


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_batched_gradients_see_no_hidden_nan(dtype):
    """torch's older vmap runs other operators than backward() does."""
    query, key, value = (torch.randn(1, 2, 6, 8).to(dtype) for _ in range(3))
    key[..., 4:, :] = value[..., 4:, :] = math.nan
    leaves = [x.requires_grad_() for x in (query, key, value)]
    output, _ = mha_ext.attention(*leaves, key_lengths=torch.tensor([4]))
    upstream = torch.ones_like(output)
    got = torch.autograd.grad(output, leaves, upstream[None], is_grads_batched=True, retain_graph=True)
    visible = [x[..., :4, :] for x in leaves]
    for batched, single in zip(got, torch.autograd.grad(output, leaves, upstream), strict=True):
        assert_rounding_only(batched[0], single, visible, "batched", dtype)


def test_batched_gradients_under_autocast_keep_their_dtype():
    leaves = [torch.randn(1, 2, 6, 8, requires_grad=True) for _ in range(3)]
    output, _ = mha_ext.attention(*leaves)
    upstream = torch.ones_like(output)
    want = torch.autograd.grad(output, leaves, upstream, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(output, leaves, upstream[None], is_grads_batched=True)
    for batched, single in zip(got, want, strict=True):
        assert_rounding_only(batched[0], single, leaves, "batched", torch.float32)


@pytest.mark.parametrize("create_graph", [False, True])
def test_value_is_no_part_of_the_weights(create_graph):
    query, key, value = (torch.randn(1, 2, 6, 8, requires_grad=True) for _ in range(3))
    _, weights = mha_ext.attention(query, key, value)
    loss = weights.square().sum()
    grads = torch.autograd.grad(loss, (query, value), create_graph=create_graph, allow_unused=True, retain_graph=True)
    assert grads[0] is not None
    assert grads[1] is None
    with pytest.raises(RuntimeError, match="used in the graph"):
        torch.autograd.grad(loss, value, create_graph=create_graph)
