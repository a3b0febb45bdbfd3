"""Properties that hold for every call: hypothesis draws sizes, dtypes, layouts and all options at random."""

import dataclasses
import math

import cases
import torch
from cases import Case
from compare import Expected, check_attention
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mha_ext

SETTINGS = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
size = st.integers(0, 9) | st.sampled_from((1, 17, 33))
side = st.none() | st.integers(-3, 12)


@st.composite
def any_case(draw, **fixed):
    """A case with everything at random, save what is fixed."""
    heads, kv_heads = draw(st.sampled_from(((1, None), (2, None), (3, 1), (4, 2), (None, None))))
    batch = draw(st.sampled_from(((), (1,), (2,)) if heads is None else ((1,), (2,), (2, 2), (0,))))
    offset = draw(st.none() | st.integers(-4, 9) | st.sampled_from(("lower_right", "tensor")))
    case = Case(
        dtype=draw(st.sampled_from(cases.DTYPES)),
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        lq=draw(size),
        lk=draw(size),
        d=draw(size),
        dv=draw(st.none() | size),
        mask=draw(st.sampled_from(cases.MASKS)),
        bias=draw(st.sampled_from(cases.BIASES)),
        is_causal=draw(st.booleans()),
        window=draw(st.none() | st.tuples(side, side)),
        causal_offset=offset,
        key_lengths=draw(st.booleans()),
        scale=draw(st.none() | st.sampled_from((0.0, -0.4, 1.0))),
        softcap=draw(st.none() | st.sampled_from((0.5, 4.0))),
        sinks=draw(st.booleans()),
        mask_value=draw(st.sampled_from((-math.inf, -1e4, -1.0))),
        dropout=draw(st.sampled_from((0.0, 0.0, 0.3, 0.9, 1.0))),
        layout=draw(st.sampled_from(cases.LAYOUTS)),
        seed=draw(st.integers(0, 5)),
    )
    return dataclasses.replace(case, **fixed)


@SETTINGS
@given(any_case(), st.sampled_from(mha_ext.supported_isas()), st.booleans())
def test_equals_the_oracle(case, isa, need_weights):
    mha_ext.set_isa(isa)
    check_attention(case, need_weights=need_weights)


@SETTINGS
@given(any_case())
def test_equals_the_three_steps(case):
    """attention(...) is the composition of the steps, with dropout between the last two."""
    query, key, value, options = case.build()
    softmax = {n: x for n, x in options.items() if n not in ("scale", "enable_gqa")}
    gqa = {"enable_gqa": True} if "enable_gqa" in options else {}
    scores = mha_ext.attention_scores(query, key, scale=case.scale, **gqa)
    weights = mha_ext.masked_softmax(scores, **softmax)
    expected = Expected(case, {"query": query, "key": key, "value": value}, options, with_grads=False)
    if case.dropout:
        kept = expected.keep.reshape(weights.shape)
        wide = weights.to(torch.float64 if case.dtype == torch.float64 else torch.float32)
        factor = 1 / (1 - case.dropout) if case.dropout < 1 else 0.0
        weights = torch.where(kept, wide * factor, 0).to(case.dtype)
    output = mha_ext.weighted_sum(weights, value, **gqa)
    expected.same("weights", weights, expected.want[1], expected.plain[1])
    expected.same("output", output, expected.want[0], expected.plain[0])


@SETTINGS
@given(any_case(sinks=False, dropout=0.0))
def test_rows_sum_to_one_or_to_nothing(case):
    """Without sinks and dropout each row of weights sums to 1, or is zero where the query sees nothing."""
    query, key, value, options = case.build()
    weights = mha_ext.attention(query, key, value, **options)[1].double()
    sums, terms = weights.sum(-1), max(1, case.lk)
    seen = Expected(case, {"query": query, "key": key, "value": value}, options, with_grads=False).want[1].sum(-1) > 0
    assert ((sums - 1).abs() <= torch.finfo(case.dtype).eps * terms)[seen].all(), case
    assert (weights[~seen] == 0).all(), case


@SETTINGS
@given(
    any_case(dtype=torch.float32, mask=None, bias=None, dropout=0.0, mask_value=-math.inf, key_lengths=True),
    st.integers(1, 6),
)
def test_keys_nobody_sees_change_nothing(case, extra):
    """More keys behind key_lengths, filled with NaN, leave the output as it is."""
    query, key, value, options = case.build()
    before = mha_ext.attention(query, key, value, **options)[0]

    def longer(x):
        return torch.cat([x, torch.full((*x.shape[:-2], extra, x.shape[-1]), math.nan)], -2)

    after = mha_ext.attention(query, longer(key), longer(value), **options)[0]
    expected = Expected(case, {"query": query, "key": key, "value": value}, options, with_grads=False)
    expected.same("output", after, expected.want[0], expected.plain[0])
    assert torch.equal(torch.isfinite(before), torch.isfinite(after)), case


@SETTINGS
@given(any_case(dtype=torch.float64))
def test_gradients_are_linear_in_what_comes_in(case):
    """Twice the incoming gradient gives exactly twice the gradients: powers of two commute with rounding."""
    query, key, value, options = case.build()
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    torch.manual_seed(0)
    output, weights = mha_ext.attention(*leaves, **options, dropout=case.dropout or None)
    incoming = [case.randn("a", output.shape), case.randn("b", weights.shape)]
    once, twice = (
        torch.autograd.grad([output, weights], leaves, [f * g for g in incoming], retain_graph=True) for f in (1.0, 2.0)
    )
    for a, b in zip(once, twice, strict=True):
        assert torch.equal(2 * a, b), case
