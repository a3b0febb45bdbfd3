"""attention_scores = scale * Q K^T against the float64 oracle, on every ISA level."""

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


def check_scores(case):
    query, key, _, _ = case.build()
    options = {} if case.scale is None else {"scale": case.scale}
    if case.kv_heads is not None:
        options["enable_gqa"] = True
    scale = abs(oracle.default_scale(case.d) if case.scale is None else case.scale)
    q, k = clean(query).abs(), over_query_heads(clean(key).abs(), case.heads or 1)

    def magnitudes(grad):
        def both(terms, shape):
            return Errors(terms, terms).shaped(shape)

        g = oracle.as_heads(grad.abs())
        dk = (g.mT @ q).unflatten(1, (case.kv_heads or case.heads or 1, -1)).sum(2)
        return {
            "result": both(scale * (q @ k.mT), case.score_shape),
            "query": both(scale * (g @ k), query.shape),
            "key": both(scale * dk, key.shape),
        }

    check_step("attention_scores", case, {"query": query, "key": key}, options, magnitudes)


PAIRS = cases.pairwise(
    dtype=cases.DTYPES,
    lq=(1, 17, 63, 65),
    lk=(1, 3, 17, 63, 65),
    d=(1, 3, 8, 31, 64, 65, 128, 256),
    scale=(None, -0.7, 0.0),
    kv_heads=(None, 1, 2),
    layout=cases.LAYOUTS,
)


@pytest.mark.parametrize("case", [Case(**row, heads=4) for row in PAIRS], ids=str)
def test_scores(case):
    check_scores(case)


LONG = (dict(lq=197, lk=257, d=64), dict(lq=257, lk=197, d=31), dict(lq=1, lk=257, d=128))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("sizes", LONG, ids=str)
def test_long(sizes, dtype):
    check_scores(Case(**sizes, dtype=dtype, batch=(1,)))


@pytest.mark.parametrize("sizes", [dict(batch=()), dict(batch=(3,)), dict(batch=(2, 1))], ids=str)
def test_leading_dimensions(sizes):
    check_scores(Case(**sizes, heads=None if len(sizes["batch"]) < 2 else 2))


@pytest.mark.parametrize("sizes", [dict(batch=(0,)), dict(lq=0), dict(lk=0), dict(d=0), dict(lq=0, lk=0)], ids=str)
def test_zero_sizes(sizes):
    """With D = 0 every score is an empty sum: 0, although 1/sqrt(D) is infinite."""
    check_scores(Case(**sizes))


def test_default_scale_is_one_over_sqrt_of_head_size():
    query, key, _, _ = Case(d=16, dtype=torch.float64).build()
    assert torch.equal(mha_ext.attention_scores(query, key), mha_ext.attention_scores(query, key, scale=0.25))
