"""What docs/comparison.md says of torch's own attention, shown on the torch that is installed: where torch changes, the
table does. What it says of mha_ext is shown by the other tests."""

import pytest
import torch
from torch.func import jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import mha_ext

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
pytestmark = [
    pytest.mark.skipif(TORCH < (2, 13), reason="docs/comparison.md describes torch 2.13 and later"),
    pytest.mark.filterwarnings("ignore"),  # torch says why it refuses, and that flex_attention was not compiled
]
FUSED, MATH = SDPBackend.FLASH_ATTENTION, SDPBackend.MATH  # all there is on CPU


def qkv(*, requires_grad=False, value_dim=8):
    torch.manual_seed(0)
    return [torch.randn(1, 2, 16, dim, requires_grad=requires_grad) for dim in (8, 8, value_dim)]


def sdpa(backend, *inputs, **options):
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(*inputs, **options)


def test_sdpa_fused_on_cpu_takes_the_plain_call():
    """What the tests below refuse is refused for its own sake."""
    query, key, value = qkv(requires_grad=True)
    output = sdpa(FUSED, query, key, value, is_causal=True)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(output.sum(), (query, key, value)))


@pytest.mark.parametrize("what", ["dropout", "bias_with_gradient", "other_value_dim"])
def test_sdpa_fused_on_cpu_refuses(what):
    inputs, options = qkv(), {}
    if what == "dropout":
        options["dropout_p"] = 0.1
    elif what == "bias_with_gradient":
        options["attn_mask"] = torch.zeros(16, 16, requires_grad=True)
    else:
        inputs = qkv(value_dim=4)
    with pytest.raises(RuntimeError, match="No available kernel"):
        sdpa(FUSED, *inputs, **options)
    sdpa(MATH, *inputs, **options)


def second_derivative(backend):
    query, key, value = qkv(requires_grad=True)
    (first,) = torch.autograd.grad(sdpa(backend, query, key, value).square().sum(), query, create_graph=True)
    return torch.autograd.grad(first.square().sum(), query)


def test_sdpa_second_derivative_is_unfused_only():
    with pytest.raises(RuntimeError, match=r"derivative for .*flash_attention_for_cpu_backward is not implemented"):
        second_derivative(FUSED)
    assert second_derivative(MATH)[0].isfinite().all()


def test_sdpa_forward_mode_is_unfused_only():
    query, key, value = qkv()

    def directional(backend):
        return jvp(lambda x: sdpa(backend, x, key, value), (query,), (torch.ones_like(query),))[1]

    with pytest.raises(NotImplementedError, match="forward AD"):
        directional(FUSED)
    assert directional(MATH).isfinite().all()


def test_sdpa_row_without_keys_is_zero():
    mask = torch.ones(16, 16, dtype=torch.bool)
    mask[3] = False
    for backend in (FUSED, MATH):
        inputs = qkv(requires_grad=True)
        output = sdpa(backend, *inputs, attn_mask=mask)
        assert not output[:, :, 3].any()
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(output.sum(), inputs))


@pytest.mark.parametrize("backend", [FUSED, MATH], ids=("fused", "math"))
def test_sdpa_spreads_nan_of_hidden_values(backend):
    query, key, value = qkv()
    value[..., 5, :] = torch.nan
    mask = torch.arange(16) != 5
    assert sdpa(backend, query, key, value, attn_mask=mask.expand(16, 16)).isnan().all()
    assert mha_ext.attention(query, key, value, mask)[0].isfinite().all()


def test_sdpa_refuses_a_mask_with_is_causal():
    options = {"attn_mask": torch.ones(16, 16, dtype=torch.bool), "is_causal": True}
    if TORCH < (2, 14):
        assert sdpa(FUSED, *qkv(), **options).isfinite().all()
    for backend in (FUSED, MATH) if TORCH >= (2, 14) else (MATH,):
        with pytest.raises(RuntimeError, match="attn_mask should not be set when is_causal"):
            sdpa(backend, *qkv(), **options)


def test_sdpa_fused_gradient_at_large_logits():
    """The weights of a query sum to 1, so that with a gradient of ones dV adds up to the number of outputs."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 1, 64, 8) for _ in range(3))
    query, key, value = 1e3 * query, 1e3 * key, value.requires_grad_()

    def total(output):
        return torch.autograd.grad(output.sum(), value)[0].sum().item()

    outputs = 64 * 8
    assert abs(total(sdpa(FUSED, query, key, value)) - outputs) > 1
    assert total(sdpa(MATH, query, key, value)) == pytest.approx(outputs, rel=1e-5)
    assert total(mha_ext.attention(query, key, value)[0]) == pytest.approx(outputs, rel=1e-5)


def test_sdpa_fused_negative_scale_with_is_causal_is_nan():
    inputs = qkv()
    assert sdpa(FUSED, *inputs, is_causal=True, scale=-1.0).isnan().any()
    assert mha_ext.scaled_dot_product_attention(*inputs, is_causal=True, scale=-1.0).isfinite().all()


def test_sdpa_takes_jagged_batches_unfused():
    """Sequences of different lengths without padding, which mha_ext's functions refuse."""
    inputs = [
        torch.nested.nested_tensor([torch.randn(3, 2, 8), torch.randn(5, 2, 8)], layout=torch.jagged).transpose(1, 2)
        for _ in range(3)
    ]
    first, second = sdpa(MATH, *inputs).transpose(1, 2).unbind()
    assert (first.shape, second.shape) == ((3, 2, 8), (5, 2, 8))
    with pytest.raises(RuntimeError, match="No viable backend"):
        sdpa(FUSED, *inputs)
    with pytest.raises(NotImplementedError, match="must be a dense"):
        mha_ext.attention(*inputs)


def padded_batch(need_weights):
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 4, 8)
    padding = torch.tensor([[False] * 4, [True] * 4])
    output, weights = layer(x, x, x, key_padding_mask=padding, need_weights=need_weights)
    output.sum().backward()
    return output[1], weights, layer.in_proj_weight.grad


def test_multihead_attention_row_without_keys_is_nan_with_weights():
    output, weights, grad = padded_batch(need_weights=True)
    assert output.isnan().all()
    assert weights[1].isnan().all()
    assert grad.isnan().any()
    output, _, grad = padded_batch(need_weights=False)
    assert output.isfinite().all()
    assert grad.isfinite().all()


def test_multihead_attention_second_derivative_with_weights_only():
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 4, 8, requires_grad=True)

    def second(need_weights):
        output, _ = layer(x, x, x, need_weights=need_weights)
        (first,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    assert second(need_weights=True).isfinite().all()
    with pytest.raises(RuntimeError, match=r"derivative for .*flash_attention_for_cpu_backward is not implemented"):
        second(need_weights=False)


def test_multihead_attention_spreads_nan_of_hidden_keys():
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(1, 4, 8)
    keys = x.clone()
    keys[:, 3] = torch.nan
    padding = torch.tensor([[False, False, False, True]])
    for need_weights in (True, False):
        assert layer(x, keys, keys, key_padding_mask=padding, need_weights=need_weights)[0].isnan().all()


def test_multihead_attention_is_causal_needs_a_mask():
    x = torch.randn(4, 8)
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        torch.nn.MultiheadAttention(8, 2)(x, x, x, is_causal=True)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiled", [False, True], ids=("eager", "compiled"))
def test_flex_attention_has_no_gradient_on_cpu(compiled):
    function = torch.compile(flex_attention) if compiled else flex_attention
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        function(*qkv(requires_grad=True))


def test_flex_attention_returns_the_logarithm_of_the_sum_but_no_weights():
    output, statistics = flex_attention(*qkv(), return_aux=AuxRequest(lse=True))
    assert output.shape == (1, 2, 16, 8)
    assert statistics.lse.shape == (1, 2, 16)
    assert not [name for name in AuxRequest.__annotations__ if "weight" in name or "prob" in name]


@pytest.mark.parametrize(
    "transformed",
    [lambda f, x: jvp(f, (x,), (torch.ones_like(x),)), lambda f, x: vmap(f)(torch.stack([x, x]))],
    ids=("jvp", "vmap"),
)
def test_flex_attention_takes_no_transform(transformed):
    query, key, value = qkv()
    with pytest.raises(Exception, match=r"functorch|fake tensor"):  # from within Dynamo, of a type of its own
        transformed(lambda x: flex_attention(x, key, value), query)


def test_flex_attention_row_without_keys_is_zero():
    mask = create_block_mask(lambda batch, head, i, j: i != 3, None, None, 16, 16, device="cpu")
    assert not flex_attention(*qkv(), block_mask=mask)[:, :, 3].any()


def test_flex_attention_spreads_nan_of_hidden_values():
    query, key, value = qkv()
    value[..., 5, :] = torch.nan
    mask = create_block_mask(lambda batch, head, i, j: j != 5, None, None, 16, 16, device="cpu")
    assert flex_attention(query, key, value, block_mask=mask).isnan().all()


def test_flex_attention_takes_another_value_size():
    assert flex_attention(*qkv(value_dim=4)).shape == (1, 2, 16, 4)


def test_flex_attention_takes_any_function_of_the_scores():
    query, key, value = qkv()
    distance = (torch.arange(16)[:, None] - torch.arange(16)).abs()
    output = flex_attention(query, key, value, score_mod=lambda score, batch, head, i, j: score - 0.5 * (i - j).abs())
    expected, _ = mha_ext.attention(query, key, value, bias=-0.5 * distance)
    torch.testing.assert_close(output, expected)


def test_flex_attention_has_no_dropout():
    with pytest.raises(TypeError, match="dropout_p"):
        flex_attention(*qkv(), dropout_p=0.1)


def test_mha_ext_has_no_eight_bit_kernels():
    inputs = [x.to(torch.float8_e4m3fn) for x in qkv()]
    with pytest.raises(TypeError, match="query must be float64, float32, bfloat16 or float16"):
        mha_ext.attention(*inputs)
