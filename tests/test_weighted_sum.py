"""weighted_sum = P V against the float64 oracle, on every ISA level."""

import cases
import oracle
import pytest
import torch
from cases import Case
from compare import check_step
from magnitudes import Errors, clean
from torch_same_dtype import over_query_heads

import mha_ext

pytestmark = pytest.mark.usefixtures("isa")


def check_weighted_sum(case):
    weights = case.tensor("weights", case.score_shape)
    value = case.tensor("value", case.shape(case.lk, case.dv, kv=True))
    w, v = clean(weights).abs(), over_query_heads(clean(value).abs(), case.heads or 1)

    def magnitudes(grad):
        def both(terms, shape):
            return Errors(terms, terms).shaped(shape)

        g = oracle.as_heads(grad.abs())
        dv = (w.mT @ g).unflatten(1, (case.kv_heads or case.heads or 1, -1)).sum(2)
        return {
            "result": both(w @ v, grad.shape),
            "weights": both(g @ v.mT, weights.shape),
            "value": both(dv, value.shape),
        }

    options = {} if case.kv_heads is None else {"enable_gqa": True}
    check_step("weighted_sum", case, {"weights": weights, "value": value}, options, magnitudes)


PAIRS = cases.pairwise(
    dtype=cases.DTYPES,
    lq=(1, 17, 63, 65),
    lk=(1, 3, 17, 63, 65, 130),
    dv=(1, 3, 8, 31, 64, 65, 128, 256),
    kv_heads=(None, 1, 2),
    layout=cases.LAYOUTS,
)


@pytest.mark.parametrize("case", [Case(**row, heads=4) for row in PAIRS], ids=str)
def test_weighted_sum(case):
    check_weighted_sum(case)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [dict(lq=197, lk=257, dv=64), dict(lq=257, lk=197, dv=31)], ids=str)
def test_long(sizes, dtype):
    check_weighted_sum(Case(**sizes, dtype=dtype, batch=(1,)))


@pytest.mark.parametrize("sizes", [dict(batch=()), dict(batch=(3,)), dict(batch=(2, 1), heads=2)], ids=str)
def test_leading_dimensions(sizes):
    check_weighted_sum(Case(**{"heads": None, **sizes}, dv=5))


@pytest.mark.parametrize("sizes", [dict(batch=(0,)), dict(lq=0), dict(lk=0), dict(dv=0), dict(lq=0, lk=0)], ids=str)
def test_zero_sizes(sizes):
    check_weighted_sum(Case(**{"dv": 4, **sizes}))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_a_weight_of_zero_hides_any_value(dtype, bad):
    """Key 5 is bad and has weight zero for the even queries: those stay finite, the odd ones show it."""
    case = Case(dtype=dtype, lq=9, lk=70, dv=33)
    weights = case.randn("weights", case.score_shape)
    value = case.randn("value", case.shape(case.lk, case.dv))
    weights[..., ::2, 5] = 0
    value[..., 5, :] = bad
    result = mha_ext.weighted_sum(weights, value)
    want = oracle.weighted_sum(weights, value)
    assert torch.equal(torch.isfinite(result), torch.isfinite(want))
    without = mha_ext.weighted_sum(weights, torch.nan_to_num(value, nan=0.0, posinf=0.0, neginf=0.0))
    error = (result - without).abs()[..., ::2, :]
    assert (error <= torch.finfo(dtype).eps * oracle.weighted_sum(weights.abs(), value.abs())[..., ::2, :]).all()
    assert not torch.isfinite(result[..., 1::2, :]).any()
