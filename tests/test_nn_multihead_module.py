"""mha_ext.nn.MultiheadAttention as a module: parameters, state, dropout, dtypes, the kernels it takes, its errors."""

import copy
import io
import math
import pickle

import pytest
import torch
from multihead import BATCH, HEADS, LK, LQ, WIDTH, Ours, Theirs, randn
from test_fused import Calls
from test_nn_multihead_attention import OPTIONS
from tolerances import assert_rounding_only


def test_weights_by_default_and_none_on_request():
    layer = Ours(WIDTH, HEADS, batch_first=True)
    x = torch.randn(BATCH, LQ, WIDTH)
    assert layer(x, x, x)[1].shape == (BATCH, LQ, LQ)
    assert layer(x, x, x, average_attn_weights=False)[1].shape == (BATCH, HEADS, LQ, LQ)
    assert layer(x, x, x, need_weights=False)[1] is None
    assert layer(x, x, x, None, False)[1] is None  # torch's order of arguments


@pytest.mark.parametrize("average", [True, False])
def test_the_weights_take_the_fused_kernel(average):
    layer, x = Ours(WIDTH, HEADS, batch_first=True), torch.randn(BATCH, LQ, WIDTH)
    with Calls() as forward:
        output, weights = layer(x, x, x, is_causal=True, average_attn_weights=average)
    with Calls() as backward:
        (output.sum() + weights.square().sum()).backward()
    assert (forward.names, backward.names) == (["fused_attention"], ["fused_attention_backward"])


def test_dropout():
    """Kept weights are scaled by 1/(1-p), the rate is p; the mean is that of the weights used; none in evaluation."""
    layer = Ours(WIDTH, HEADS, dropout=0.25, batch_first=True).double()
    x = randn(4, 60, WIDTH)
    undropped = copy.deepcopy(layer).eval()(x, x, x, average_attn_weights=False)[1]
    torch.manual_seed(1)
    weights = layer(x, x, x, average_attn_weights=False)[1]
    kept = weights != 0
    n = weights.numel()
    assert abs(kept.double().mean() - 0.75) < 5 * math.sqrt(0.25 * 0.75 / n)
    assert_rounding_only(weights[kept], undropped[kept] / 0.75, (x,))
    torch.manual_seed(1)
    output, mean = layer(x, x, x)
    assert_rounding_only(mean, weights.mean(1), (x,))
    torch.manual_seed(1)
    assert_rounding_only(layer(x, x, x, need_weights=False)[0], output, (x,))
    layer.eval()
    before = torch.get_rng_state()
    assert torch.equal(layer(x, x, x)[0], layer(x, x, x)[0])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_state_dict_both_ways(options):
    first, second = Ours(WIDTH, HEADS, **options), Theirs(WIDTH, HEADS, **options)
    for source, target in ((first, second), (second, first)):
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.normal_()
        assert str(target.load_state_dict(source.state_dict(), strict=True)) == "<All keys matched successfully>"
        assert list(source.state_dict()) == list(target.state_dict())
        for a, b in zip(source.parameters(), target.parameters(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("options", [{}, {"kdim": 5}, {"bias": False, "add_bias_kv": True}], ids=str)
def test_the_same_initial_parameters(options):
    made = []
    for kind in (Ours, Theirs):
        torch.manual_seed(7)
        module = kind(WIDTH, HEADS, **options)
        torch.manual_seed(8)
        module._reset_parameters()  # some models call it
        made.append(list(module.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


def test_pickle_deepcopy_and_save():
    layer = Ours(WIDTH, HEADS, dropout=0.1, batch_first=True, add_zero_attn=True).eval()
    x = torch.randn(BATCH, LQ, WIDTH)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for twin in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer), torch.load(buffer, weights_only=False)):
        assert type(twin) is Ours
        for a, b in zip(twin(x, x, x), layer(x, x, x), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(dtype):
    layer = Ours(WIDTH, HEADS, dtype=dtype)
    x = torch.randn(LQ, BATCH, WIDTH).to(dtype)
    output, weights = layer(x, x, x, key_padding_mask=torch.zeros(BATCH, LQ))  # float32 for all, as encoders pass it
    assert output.dtype == weights.dtype == dtype
    wide = copy.deepcopy(layer).double()(x.double(), x.double(), x.double())
    for a, b in zip((output, weights), wide, strict=True):
        assert (a.double() - b).abs().max() <= 40 * torch.finfo(dtype).eps


def test_autocast():
    layer = Ours(WIDTH, HEADS)
    x = torch.randn(LQ, BATCH, WIDTH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, weights = layer(x, x, x, attn_mask=torch.zeros(LQ, LQ))
    assert output.dtype == weights.dtype == torch.bfloat16
    (output.float().sum() + weights.float().square().sum()).backward()
    assert all(p.grad.dtype == torch.float32 and torch.isfinite(p.grad).all() for p in layer.parameters())


@pytest.mark.parametrize("sizes", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (1, 1, 1)], ids=str)
def test_sizes_of_0_and_1(sizes):
    batch, queries, keys = sizes
    layer = Ours(WIDTH, HEADS, batch_first=True)
    query, key = torch.randn(batch, queries, WIDTH), torch.randn(batch, keys, WIDTH)
    output, weights = layer(query, key, key)
    assert output.shape == query.shape
    assert weights.shape == (batch, queries, keys)
    output.sum().backward()


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((10, 3), ValueError, "embed_dim must be a positive multiple of num_heads, got 10 and 3"),
        ((0, 1), ValueError, "embed_dim must be a positive multiple of num_heads, got 0 and 1"),
        ((8.0, 2), TypeError, "embed_dim must be an int, got float"),
        ((8, True), TypeError, "num_heads must be an int, got bool"),
        ((8, 2, 1.5), ValueError, r"dropout must lie in \[0, 1\], got 1.5"),
    ],
)
def test_errors_of_the_constructor(arguments, error, match):
    with pytest.raises(error, match=match):
        Ours(*arguments)


SHORT = torch.zeros(BATCH, LK - 1, dtype=torch.bool)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"query": [1]}, TypeError, "query must be a torch.Tensor, got list"),
        ({"query": torch.zeros(2, 5, 3)}, ValueError, r"query must have shape \(batch, length, 12\) or .*\(2, 5, 3\)"),
        ({"key": torch.zeros(LK, WIDTH)}, ValueError, "key must have as many dimensions as query, 3, got shape"),
        ({"value": torch.zeros(2, 5, WIDTH)}, ValueError, r"value must have length and batch of key, \(2, 7\), got"),
        ({"query": torch.zeros(1, LQ, WIDTH)}, ValueError, "key must have the batch of query, 1 in dimension 0, got"),
        ({"query": torch.zeros(2, 5, WIDTH).double()}, TypeError, "query must have the dtype of the module, "),
        ({"key": torch.zeros(2, 7, WIDTH).half()}, TypeError, "key must have the dtype of the module, "),
        ({"key_padding_mask": SHORT}, ValueError, r"key_padding_mask must have shape \(2, 7\), got \(2, 6\)"),
        ({"key_padding_mask": SHORT.int()}, TypeError, "key_padding_mask must be bool .* got torch.int32"),
        ({"attn_mask": SHORT}, ValueError, r"attn_mask must have shape \(5, 7\) or \(6, 5, 7\), got \(2, 6\)"),
        ({"attn_mask": "causal"}, TypeError, "attn_mask must be a torch.Tensor, got str"),
        ({"need_weights": 1}, TypeError, "need_weights must be Python's True or False, got int"),
    ],
)  # fmt: skip
def test_errors_of_the_call(change, error, match):
    layer = Ours(WIDTH, HEADS, batch_first=True)
    given = {"query": torch.zeros(BATCH, LQ, WIDTH), "key": torch.zeros(BATCH, LK, WIDTH)}
    given["value"] = torch.zeros(BATCH, LK, WIDTH)
    with pytest.raises(error, match=match):
        layer(**{**given, **change})


def test_out_proj_is_called():
    """Its hooks act; torch's module reads its weight and calls nothing."""
    x = torch.randn(LQ, BATCH, WIDTH)
    for module, called in ((Ours(WIDTH, HEADS), True), (Theirs(WIDTH, HEADS), False)):
        module.out_proj.register_forward_hook(lambda *_: torch.zeros(LQ, BATCH, WIDTH))
        assert bool(module(x, x, x)[0].any()) != called
