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
        exact = Errors(torch.zeros_like(dp), torch.zeros_like(dp))
        ds, ds_error, grads = softmax.backward(dp, exact, exact.map(lambda e: e.sum(-1, keepdim=True)))
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


def same_as_float64(got, want, same_dtype, slack=0.0):
    """Within twice the error of PyTorch in the same dtype, plus one rounding of a weight. NaN is never within."""
    eps = torch.finfo(got.dtype).eps
    tolerance = 2 * (same_dtype.double() - want).abs().max() + eps + slack
    assert ((got.double() - want).abs() <= tolerance).all()


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("mask_value", [1e39, 1e300, -1e39, -1e300], ids=str)
def test_mask_value_beyond_the_dtype(mask_value, dtype):
    """Finite, so it hides by being huge: float32's largest number does what 1e39 does in float64."""
    scores, mask = torch.randn(2, 3, 5, 19).to(dtype), torch.rand(2, 3, 5, 19) < 0.5
    mask[0, 0, 0], mask[0, 0, 1] = False, True  # nothing visible; nothing hidden
    want = torch.softmax(scores.double().masked_fill(~mask, mask_value), -1)
    in_dtype = torch.softmax(scores.masked_fill(~mask, max(-1e4, min(1e4, mask_value))), -1)
    got = mha_ext.masked_softmax(scores, mask, mask_value=mask_value)
    same_as_float64(got, want, in_dtype)
    assert (got[want == 0] == 0).all()


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [1e39, 1e300, 1e-50, 1e-320], ids=str)
def test_softcap_beyond_the_dtype(softcap, dtype):
    """Far too large is none at all, far too small makes all logits equal: both as float64 has it, forward and back."""

    def capped(x, cap):
        return torch.softmax(x if cap is None else cap * torch.tanh(x / cap), -1)

    def weights_and_gradient(function, x):
        x = x.detach().requires_grad_()
        weights = function(x)
        weights.backward(grad.to(x.dtype))
        return weights.detach(), x.grad

    scores, grad = torch.randn(2, 3, 5, 19).to(dtype), torch.randn(2, 3, 5, 19).to(dtype)
    want = weights_and_gradient(lambda x: capped(x, softcap), scores.double())
    in_dtype = weights_and_gradient(lambda x: capped(x, None) if softcap > 1 else capped(0 * x, None), scores)
    got = weights_and_gradient(lambda x: mha_ext.masked_softmax(x, softcap=softcap), scores)
    # At float32's largest softcap scores / softcap is subnormal: logits are multiples of softcap * smallest number.
    float32 = torch.finfo(torch.float32)
    step = 0.0 if dtype == torch.float64 else float32.max * float32.smallest_normal * float32.eps
    for ours, right, torchs in zip(got, want, in_dtype, strict=True):
        same_as_float64(ours, right, torchs, step * grad.double().abs().max())
