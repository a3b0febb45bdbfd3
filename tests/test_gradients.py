"""First and second derivatives in float64 by finite differences, for each operator and each option of attention."""

import differentiable
import pytest
import torch
from cases import DTYPES, Case
from compare import check_attention
from levels import highest_level_only
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import mha_ext

pytestmark = pytest.mark.usefixtures("isa")

every_function = pytest.mark.parametrize("function", differentiable.ALL, ids=str)


@every_function
def test_gradcheck(function):
    """Reverse mode; for attention through output and weights alike. Undefined incoming gradients count as zero."""
    assert gradcheck(function.call, function.leaves(), check_undefined_grad=True)


@every_function
def test_batched_gradients(function):
    """vmap over the backward, as torch.autograd.grad(is_grads_batched=True) runs it."""
    assert gradcheck(function.call, function.leaves(), check_batched_grad=True, fast_mode=True)


@every_function
def test_gradgradcheck(function):
    assert gradgradcheck(function.call, function.leaves(), fast_mode=True)


SLOW = [
    f for f in differentiable.ALL if f.name in ("plain", "everything", "masked_softmax_all", "softcap_bias", "sinks")
]


@highest_level_only
@pytest.mark.parametrize("function", SLOW, ids=str)
def test_gradgradcheck_every_entry(function):
    """fast_mode projects on one random direction; here every entry of the Jacobian is compared."""
    assert gradgradcheck(function.call, function.leaves())


@pytest.mark.parametrize("result", [0, 1], ids=("output", "weights"))
@pytest.mark.parametrize("function", differentiable.ATTENTION, ids=str)
def test_gradgradcheck_one_result(function, result):
    """Only one of the two results is used: the other's incoming gradient is undefined."""
    inputs = function.leaves()
    used = [x for n, x in enumerate(inputs) if result == 0 or n != 2]  # the weights don't depend on value

    def call(*given):
        given = list(given)
        return function.call(*(given.pop(0) if any(x is u for u in used) else x.detach() for x in inputs))[result]

    assert gradcheck(call, tuple(used), fast_mode=True)
    assert gradgradcheck(call, tuple(used), fast_mode=True)


def test_third_derivative():
    function = next(f for f in differentiable.ATTENTION if f.name == "softcap_bias")

    def first(*inputs):
        output, weights = function.call(*inputs)
        loss = output.sin().sum() + (weights**2).sum()
        return torch.autograd.grad(loss, inputs, create_graph=True)

    assert gradgradcheck(first, function.leaves(), fast_mode=True)


LOW = [d for d in DTYPES if d != torch.float64]


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(mask="full", bias="per_key", softcap=2.0, sinks=True),
        dict(is_causal=True, kv_heads=1),
        dict(dropout=0.3, mask="per_key", mask_value=-100.0),
    ],
    ids=str,
)
def test_low_precision(options, dtype):
    """Gradients by the tolerance rule, through output and weights, at a size with several tiles."""
    check_attention(Case(**options, dtype=dtype, lq=40, lk=70, d=48, dv=40))


def test_no_graph_where_none_is_wanted():
    query, key, value, _ = Case().build()
    output, weights = mha_ext.attention(query, key, value)
    assert not output.requires_grad
    assert not weights.requires_grad
    with torch.no_grad():
        output, weights = mha_ext.attention(query.requires_grad_(), key, value)
    assert not output.requires_grad
    with torch.inference_mode():
        output, weights = mha_ext.attention(query, key, value)
    assert output.is_inference()


def test_weights_do_not_require_grad_by_value_alone():
    query, key, value, _ = Case().build()
    output, weights = mha_ext.attention(query, key, value.requires_grad_())
    assert output.requires_grad
    (grad,) = torch.autograd.grad(output.sum(), value)
    assert torch.equal(grad[..., 0], grad[..., 1])  # each column of value is weighted alike
    assert weights.shape == (2, 2, 5, 7)


def test_accumulates_into_grad():
    query, key, value, _ = Case().build()
    leaves = [x.requires_grad_() for x in (query, key, value)]
    for _ in range(2):
        mha_ext.attention(*leaves)[0].sum().backward()
    once = torch.autograd.grad(mha_ext.attention(*leaves)[0].sum(), leaves)
    for leaf, grad in zip(leaves, once, strict=True):
        assert torch.equal(leaf.grad, 2 * grad)


def test_checkpoint_replays_the_dropout_bits():
    query, key, value, _ = Case(lq=17, lk=17).build()
    value.requires_grad_()

    def call(value):
        return mha_ext.attention(query, key, value, dropout=0.5)[0]

    torch.manual_seed(2)
    (direct,) = torch.autograd.grad(call(value).sum(), value)
    torch.manual_seed(2)
    (replayed,) = torch.autograd.grad(checkpoint(call, value, use_reentrant=False).sum(), value)
    assert torch.equal(direct, replayed)
