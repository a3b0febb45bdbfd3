"""Forward mode: dual numbers through each operator and each option, and forward over reverse."""

import differentiable
import pytest
import torch
from cases import Case
from levels import highest_level_only
from tolerances import assert_rounding_only
from torch.autograd import forward_ad as fwAD
from torch.autograd import gradcheck, gradgradcheck

import mha_ext

pytestmark = pytest.mark.usefixtures("isa")

every_function = pytest.mark.parametrize("function", differentiable.ALL, ids=str)


@highest_level_only
@every_function
def test_gradcheck_forward_every_entry(function):
    assert gradcheck(function.call, function.leaves(), check_forward_ad=True, check_backward_ad=False)


@every_function
def test_gradcheck_forward(function):
    """fast_mode projects on one random direction."""
    assert gradcheck(function.call, function.leaves(), check_forward_ad=True, check_backward_ad=False, fast_mode=True)


@pytest.mark.parametrize("function", differentiable.WITHOUT_DROPOUT, ids=str)
def test_gradcheck_batched_forward(function):
    assert gradcheck(
        function.call,
        function.leaves(),
        check_forward_ad=True,
        check_backward_ad=False,
        check_batched_forward_grad=True,
        check_batched_grad=False,
        fast_mode=True,
    )  # vmaps the whole call; random calls may not be vmapped there


@every_function
def test_forward_over_reverse(function):
    assert gradgradcheck(function.call, function.leaves(), check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("name", ["query", "key", "value", "bias", "sinks"])
def test_tangent_on_one_input_alone(name):
    """A tangent on one input reaches both results, except value's, which cannot reach the weights."""
    case = Case(**differentiable.TINY, mask="full", bias="heads", sinks=True, softcap=1.5)
    query, key, value, options = case.build()
    inputs = {"query": query, "key": key, "value": value, "bias": options["bias"], "sinks": options["sinks"]}
    options = {n: x for n, x in options.items() if n not in inputs}
    tangent = case.randn("tangent", inputs[name].shape)

    def along(x):
        return mha_ext.attention(**{**inputs, name: x}, **options)

    with fwAD.dual_level():
        got = [fwAD.unpack_dual(x).tangent for x in along(fwAD.make_dual(inputs[name], tangent))]
    want = torch.autograd.functional.jvp(along, inputs[name], tangent)[1]  # reverse mode twice
    if name == "value":
        got[1] = torch.zeros_like(want[1]) if got[1] is None else got[1]
    assert_rounding_only(got, want, inputs.values(), name)


def test_no_tangent_no_cost_in_accuracy():
    """Inside a dual level the three steps run; calls without tangents differ by rounding alone from those outside."""
    query, key, value, _ = Case(dtype=torch.float64).build()
    outside = mha_ext.attention(query, key, value)
    with fwAD.dual_level():
        inside = mha_ext.attention(query, key, value)
        assert all(fwAD.unpack_dual(x).tangent is None for x in inside)
    assert_rounding_only(inside, outside, (query, key, value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tangent_has_the_dtype_of_the_input(dtype):
    query, key, value, _ = Case(dtype=dtype).build()
    with fwAD.dual_level():
        for result in mha_ext.attention(fwAD.make_dual(query, torch.ones_like(query)), key, value):
            tangent = fwAD.unpack_dual(result).tangent
            assert tangent.dtype == dtype
            assert torch.isfinite(tangent).all()


def test_tangent_and_gradient_together():
    """A dual input that also requires grad: the tangent of the result is differentiable."""
    function = next(f for f in differentiable.ATTENTION if f.name == "plain")
    query, key, value = function.leaves()
    tangent = torch.randn_like(query)

    with fwAD.dual_level():
        slope = fwAD.unpack_dual(function.call(fwAD.make_dual(query, tangent), key, value)[0]).tangent
        got = torch.autograd.grad(slope.sin().sum(), (query, key, value))
    slope = torch.autograd.functional.jvp(
        lambda q: function.plain(q, key, value)[0], query, tangent, create_graph=True
    )[1]
    assert_rounding_only(got, torch.autograd.grad(slope.sin().sum(), (query, key, value)), function.inputs)
