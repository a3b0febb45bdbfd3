"""masked_softmax against the float64 oracle: everything that hides keys or shifts logits, on every ISA level."""

import math

import cases
import oracle
import pytest
import torch
from cases import Case
from compare import check_step
from magnitudes import Errors, SoftmaxMagnitudes

import mha_ext

pytestmark = pytest.mark.usefixtures("isa")
VISIBILITY = ("mask", "is_causal", "window", "causal_offset", "key_lengths")


def check_softmax(case):
    options = case.options()
    options.pop("scale", None)
    options.pop("enable_gqa", None)
    tensors = {"scores": case.tensor("scores", case.score_shape)}
    tensors |= {name: options.pop(name) for name in ("bias", "sinks") if name in options}
    see = oracle.visible(case.score_shape, **{n: options[n] for n in VISIBILITY if n in options})
    s = oracle.as_heads(tensors["scores"].double())
    zero = torch.zeros_like(s)
    softmax = SoftmaxMagnitudes(
        s,
        Errors(zero, zero),
        case.score_shape,
        see,
        bias=tensors.get("bias"),
        softcap=case.softcap,
        sinks=tensors.get("sinks"),
        mask_value=case.mask_value,
    )

    def magnitudes(grad):
        dp = oracle.as_heads(grad)
        ds, ds_error, grads = softmax.backward(dp, Errors(torch.zeros_like(dp), torch.zeros_like(dp)))
        return {"result": softmax.weights(), "scores": (ds_error + ds).shaped(case.score_shape), **grads}

    check_step("masked_softmax", case, tensors, options, magnitudes)


PAIRS = cases.pairwise(
    dtype=cases.DTYPES,
    lq=(1, 3, 17, 65),
    lk=(1, 7, 8, 31, 63, 65, 129),
    mask=cases.MASKS,
    bias=cases.BIASES,
    is_causal=(False, True),
    window=(None, (3, 0), (None, 2), (2, None), (1, 1)),
    causal_offset=(None, -2, "tensor", "lower_right"),
    key_lengths=(False, True),
    softcap=(None, 0.7),
    sinks=(False, True),
    mask_value=(-math.inf, -1e4, -2.0, 0.0),
    layout=cases.LAYOUTS,
)


@pytest.mark.parametrize("case", [Case(**row, heads=2) for row in PAIRS], ids=str)
def test_any_options(case):
    check_softmax(case)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("lk", [197, 257, 1025])
def test_long_rows(lk, dtype):
    check_softmax(Case(batch=(1,), lq=9, lk=lk, mask="full", bias="per_key", dtype=dtype))


@pytest.mark.parametrize("options", [{}, dict(mask="full", bias="full", sinks=True)], ids=("plain", "all"))
@pytest.mark.parametrize("sizes", [dict(batch=(0,)), dict(heads=0), dict(lq=0), dict(lk=0)], ids=str)
def test_zero_sizes(sizes, options):
    check_softmax(Case(**sizes, **options))


@pytest.mark.parametrize("sizes", [dict(batch=()), dict(batch=(3,)), dict(batch=(2, 1), heads=2)], ids=str)
def test_leading_dimensions(sizes):
    check_softmax(
        Case(**{"heads": None, **sizes}, mask="full", bias="full", is_causal=True, key_lengths=bool(sizes["batch"]))
    )


def test_hidden_weights_are_exactly_zero():
    case = Case(mask="full", lq=33, lk=65)
    weights = mha_ext.masked_softmax(case.tensor("scores", case.score_shape), case.build_mask())
    assert (weights[~case.build_mask()] == 0).all()
    assert (weights[case.build_mask()] > 0).all()


def test_a_sink_takes_its_share():
    """One visible key with logit a and a sink with logit b: the key keeps 1 / (1 + exp(b - a))."""
    scores, sinks = torch.tensor([[[[1.0]]]], dtype=torch.float64), torch.tensor([3.0], dtype=torch.float64)
    weight = mha_ext.masked_softmax(scores, sinks=sinks).item()
    assert math.isclose(weight, 1 / (1 + math.exp(2)), rel_tol=4 * torch.finfo(torch.float64).eps)
