"""The meta device: every public function and module works out shapes and dtypes there, without data."""

import pytest
import torch
from cases import DTYPES, LAYOUTS, Case

import mha_ext


def to_meta(x):
    return x.to("meta") if isinstance(x, torch.Tensor) else x


def assert_same_form(got, want):
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    for g, w in zip(got, want, strict=True):
        assert g.is_meta
        assert (g.shape, g.dtype, g.stride()) == (w.shape, w.dtype, w.stride())


FULL = dict(mask="full", bias="heads", sinks=True, softcap=2.0, key_lengths=True, is_causal=True)
OPTIONS = {
    "plain": {},
    "everything": dict(**FULL, causal_offset="tensor", window=(3, None), kv_heads=1),
    "lower_right": dict(**FULL, causal_offset="lower_right", mask_value=-1e4),
    "float_mask": dict(mask="float"),
    "two_dimensions": dict(batch=(), heads=None),
    "nothing": dict(lk=0),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_attention(options, dtype):
    query, key, value, given = Case(**options, dtype=dtype).build()
    fake = mha_ext.attention(*(x.to("meta") for x in (query, key, value)), **{n: to_meta(x) for n, x in given.items()})
    assert_same_form(fake, mha_ext.attention(query, key, value, **given))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    query, key, value, _ = Case(layout=layout).build()
    fake = mha_ext.attention(*(x.to("meta") for x in (query, key, value)))
    assert_same_form(fake, mha_ext.attention(query, key, value))


def test_steps():
    query, key, value, options = Case(mask="full", bias="heads").build()
    scores, weights = torch.randn(2, 2, 5, 7), torch.rand(2, 2, 5, 7)
    for step, tensors, given in (
        (mha_ext.attention_scores, (query, key), {}),
        (mha_ext.masked_softmax, (scores,), options),
        (mha_ext.weighted_sum, (weights, value), {}),
    ):
        fake = step(*(x.to("meta") for x in tensors), **{n: to_meta(x) for n, x in given.items()})
        assert_same_form(fake, step(*tensors, **given))


def test_dropout_and_gradients():
    query, key, value = (x.to("meta").requires_grad_() for x in Case().build()[:3])
    output, weights = mha_ext.attention(query, key, value, dropout=0.5)
    grads = torch.autograd.grad([output, weights], [query, key, value], [output, weights])
    assert [(g.shape, g.device.type) for g in grads] == [(x.shape, "meta") for x in (query, key, value)]


def test_twin():
    query, key, value, _ = Case().build()
    mask = torch.zeros(5, 7)
    fake = mha_ext.scaled_dot_product_attention(*(x.to("meta") for x in (query, key, value, mask)))
    assert_same_form(fake, mha_ext.scaled_dot_product_attention(query, key, value, mask))


@pytest.mark.parametrize("training", [True, False])
def test_modules_under_torch_device(training):
    with torch.device("meta"):
        layer = mha_ext.MultiHeadAttention(16, 4).train(training)
        heads = mha_ext.SelfAttention().train(training)
        x, mask = torch.empty(2, 5, 16), torch.ones(5, 5)
        out, attn = layer(x, x, x, mask)
        alone = heads(x, x, x, mask)
    assert all(p.is_meta for p in layer.parameters())
    assert (out.shape, attn.shape) == ((2, 5, 16), (2, 4, 5, 5))
    assert [y.shape for y in alone] == [(2, 5, 16), (2, 5, 5)]
    assert all(y.is_meta for y in (out, attn, *alone))


def test_a_module_made_on_meta_loads_and_runs():
    source = mha_ext.MultiHeadAttention(16, 4).eval()
    with torch.device("meta"):
        layer = mha_ext.MultiHeadAttention(16, 4).eval()
    layer.load_state_dict(source.state_dict(), assign=True)
    x = torch.randn(2, 5, 16)
    assert torch.equal(layer(x, x, x)[0], source(x, x, x)[0])
