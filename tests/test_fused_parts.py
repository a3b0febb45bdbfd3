"""The fused operator where keys are cut: into blocks of 256, and into parts of their own tasks where one head has many
keys. NaN may lie in any of them."""

import math

import pytest
import torch
from cases import DTYPES
from tolerances import assert_same_bits

import mha_ext

pytestmark = pytest.mark.usefixtures("isa")

LENGTH = 1100  # of one head: enough for two parts, each of several blocks
VISIBLE = {
    "mask": {},
    "causal": {"is_causal": True},
    "window": {"window": (200, 200)},
    "sinks": {"is_causal": True, "sinks": torch.tensor([0.5])},
    "dropout": {"is_causal": True, "dropout": 0.3},
}


def run(tensors, options):
    """Output and gradients."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    torch.manual_seed(1)
    output, _ = mha_ext.attention(*leaves, **options, need_weights=False)
    grads = torch.autograd.grad(output, leaves, torch.ones_like(output))
    return dict(zip(("output", "query", "key", "value"), (output.detach(), *grads), strict=True))


@pytest.mark.parametrize("hidden", [5, 700])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", VISIBLE)
def test_hidden_nan_in_one_part(how, dtype, hidden):
    """The same bits as with zeros there."""
    options = {n: x.to(dtype) if n == "sinks" else x for n, x in VISIBLE[how].items()}
    options["mask"] = (torch.arange(LENGTH) != hidden)[None]
    clean = [torch.randn(1, 1, LENGTH, 32).to(dtype) for _ in range(3)]
    for x in clean[1:]:
        x[..., hidden, :] = 0
    spoilt = [x.clone() for x in clean]
    for x in spoilt[1:]:
        x[..., hidden, :] = math.nan
    want, got = run(clean, options), run(spoilt, options)
    for name in want:
        assert_same_bits(got[name], want[name], f"{how}: {name}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_visible_nan_spoils_only_rows_that_see_it(dtype):
    tensors = [torch.randn(1, 1, LENGTH, 32).to(dtype) for _ in range(3)]
    want, _ = mha_ext.attention(*tensors, is_causal=True, need_weights=False)
    tensors[2][0, 0, 900, 3] = math.nan
    got, _ = mha_ext.attention(*tensors, is_causal=True, need_weights=False)
    assert_same_bits(got[..., :900, :], want[..., :900, :])
    assert torch.isnan(got[..., 900:, 3]).all()


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("dominant", [10, 300, 599])
@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_value_without_weight_leaves_no_trace(dtype, queries, dominant, need_weights):
    """Key 3 counts until the dominant one comes, wherever that is; its NaN is gone then."""
    query, key, value = torch.ones(1, 1, queries, 4), torch.zeros(1, 1, 600, 4), torch.ones(1, 1, 600, 4)
    key[..., dominant, :] = 1000
    value[..., 3, 0] = math.nan
    output, _ = mha_ext.attention(*(x.to(dtype) for x in (query, key, value)), need_weights=need_weights)
    assert (output == 1).all(), output


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(16, 0), (0, 16), (0, 0), (1, 1)])
def test_heads_without_elements(head_dim, value_dim, dtype):
    """One query and several; without elements all scores are 0."""
    for queries in (1, 20):
        query, key = torch.randn(1, 1, queries, head_dim).to(dtype), torch.randn(1, 1, 5, head_dim).to(dtype)
        value = torch.randn(1, 1, 5, value_dim).to(dtype)
        output, weights = mha_ext.attention(query, key, value)
        assert output.shape == (1, 1, queries, value_dim)
        assert output.isfinite().all()
        if head_dim == 0:
            assert torch.equal(weights, torch.full_like(weights, 0.2))
