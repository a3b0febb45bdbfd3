"""On a GPU: what the values (MHA_EXT_TEST_ON=cuda) do not show. Streams, devices, graphs, opcheck, autocast."""

import pytest
import torch
from tolerances import assert_same_bits

import mha_ext
from mha_ext._load import why_no_gpu

pytestmark = pytest.mark.skipif(why_no_gpu() is not None, reason=f"needs a GPU: {why_no_gpu()}")


def inputs(dtype=torch.float16, shape=(2, 4, 130, 64), requires_grad=False):
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(shape, generator=generator).to("cuda", dtype) for _ in range(3)]
    return [x.requires_grad_(requires_grad) for x in made]


def test_dropout_bits_are_those_of_the_cpu():
    seed = torch.tensor(12345)
    weights = torch.ones(3, 4, 65, 130)
    here = torch.ops.mha_ext.dropout(weights, seed, 0.3)
    assert_same_bits(torch.ops.mha_ext.dropout(weights.cuda(), seed.cuda(), 0.3).cpu(), here)


def test_same_bits_on_every_run():
    leaves = inputs(requires_grad=True)

    def run():
        output, _ = mha_ext.attention(*leaves, need_weights=False)
        return output, *torch.autograd.grad(output.square().sum(), leaves)

    first = run()
    for _ in range(5):
        for x, y in zip(run(), first, strict=True):
            assert_same_bits(x.cpu(), y.cpu())


def test_the_current_stream_is_used():
    """What is queued before on another stream is seen; nothing waits for the default stream."""
    query, key, value = inputs()
    want, _ = mha_ext.attention(query, key, value)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = torch.zeros_like(query)
        torch.cuda._sleep(50_000_000)
        late.copy_(query)
        got, _ = mha_ext.attention(late, key, value)
    stream.synchronize()
    assert_same_bits(got.cpu(), want.cpu())


GRAPHS = {
    "plain": ((2, 4, 130, 64), {"is_causal": True}),
    "parts": ((1, 1, 2000, 128), {}),  # of the keys, of few queries
    "options": ((2, 4, 130, 128), {"softcap": 3.0, "window": (40, 0)}),
}


@pytest.mark.parametrize("how", GRAPHS)
def test_a_cuda_graph_replays_forward_and_backward(how):
    shape, options = GRAPHS[how]
    key, value = inputs(shape=shape, requires_grad=True)[:2]
    query = inputs(shape=(*shape[:2], 5 if how == "parts" else shape[2], shape[3]), requires_grad=True)[2]
    leaves = query, key, value
    upstream = torch.randn_like(query)

    def run():
        output, _ = mha_ext.attention(*leaves, **options, need_weights=False)
        return output, *torch.autograd.grad(output, leaves, upstream)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # as torch wants it before a capture
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    with torch.no_grad():
        for x in leaves:
            x.copy_(x.flip(0, -1))
    graph.replay()
    for got, want in zip(captured, run(), strict=True):
        assert_same_bits(got.cpu(), want.cpu(), how)


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_another_device_than_the_current_one():
    query, key, value = inputs()
    want, _ = mha_ext.attention(query, key, value)
    output, _ = mha_ext.attention(*(x.to("cuda:1") for x in (query, key, value)))
    assert output.device == torch.device("cuda:1")
    assert_same_bits(output.cpu(), want.cpu())


def test_devices_that_differ_are_refused():
    query, key, value = inputs()
    with pytest.raises(ValueError, match="device"):
        mha_ext.attention(query, key.cpu(), value)
    with pytest.raises(ValueError, match="CUDA device"):
        torch.ops.mha_ext.attention_scores(query, key.cpu(), 1.0)


def test_autocast_casts():
    query, key, value = inputs(torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        output, _ = mha_ext.attention(query, key, value)
    assert output.dtype == torch.bfloat16


def test_opcheck():
    query, key, value = inputs(torch.float32, (2, 2, 5, 8))
    for q in (query, query.transpose(-1, -2).contiguous().transpose(-1, -2)):
        torch.library.opcheck(
            torch.ops.mha_ext.fused_attention.default, (q, key, value, 0.3, -torch.inf, 0, True, True)
        )
        torch.library.opcheck(torch.ops.mha_ext.weighted_sum.default, (torch.rand(2, 2, 5, 5).cuda(), value, 1.0))


def test_compile_without_graph_break():
    query, key, value = inputs(requires_grad=True)

    @torch.compile(fullgraph=True)
    def loss(q, k, v):
        return mha_ext.attention(q, k, v, is_causal=True, need_weights=False)[0].square().sum()

    got = torch.autograd.grad(loss(query, key, value), [query, key, value])
    want = torch.autograd.grad(
        mha_ext.attention(query, key, value, is_causal=True, need_weights=False)[0].square().sum(), [query, key, value]
    )
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, atol=2e-2, rtol=2e-2)
