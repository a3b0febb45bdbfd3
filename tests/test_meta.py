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


def meta(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("which", ["all", "value"])
def test_broadcast_batches(which, need_weights):
    """What has to be expanded first is not taken as it is."""
    tensors = [torch.randn(1 if which == "all" or n < 2 else 4, 1, 5, 8) for n in range(3)]
    if which == "all":
        tensors[1:] = (torch.randn(3, 1, 7, 8) for _ in range(2))
    fake = mha_ext.attention(*(x.to("meta") for x in tensors), need_weights=need_weights)
    real = mha_ext.attention(*tensors, need_weights=need_weights)
    assert fake[0].shape == real[0].shape
    if need_weights:
        assert_same_form(fake, real)


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        (meta(2, 2, 7, 4), meta(2, 2, 7, 8), ValueError),
        (meta(2, 2, 7, 8), meta(2, 2, 6, 8), ValueError),
        (meta(2, 3, 7, 8), meta(2, 3, 7, 8), ValueError),
        (meta(3, 2, 7, 8), meta(3, 2, 7, 8), ValueError),
        (meta(2, 2, 7, 8, dtype=torch.float64), meta(2, 2, 7, 8), TypeError),
        (meta(2, 2, 7, 8, dtype=torch.int32), meta(2, 2, 7, 8, dtype=torch.int32), TypeError),
    ],
    ids=["head_dim", "keys", "heads", "batch", "dtype", "integers"],
)
@pytest.mark.parametrize("enable_gqa", [False, True])
def test_errors(key, value, error, enable_gqa):
    """What the CPU refuses is refused here, by the operator too."""
    query = meta(2, 2, 5, 8)
    with pytest.raises(error):
        mha_ext.attention(query, key, value, enable_gqa=enable_gqa)
    with pytest.raises(ValueError, match="mha_ext: "):
        torch.ops.mha_ext.fused_attention(query, key, value, 1.0, -torch.inf, 2**63 - 1, False, False)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.float8_e5m2], ids=str)
def test_unsupported_dtypes_of_all(dtype):
    x = meta(2, 2, 5, 8, dtype=dtype)
    for function in (mha_ext.attention, mha_ext.scaled_dot_product_attention):
        with pytest.raises(TypeError, match=f"^query must be float64, float32, bfloat16 or float16, got {dtype}$"):
            function(x, x, x)
