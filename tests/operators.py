"""Arguments for every operator in torch.ops.mha_ext, for opcheck and for the attack on raw operators."""

import torch
from cases import lay_out

UNBOUNDED = 2**63 - 1
SHAPES = {
    "usual": (2, 4, 5, 7, 3, 6),
    "one": (1, 1, 1, 1, 1, 1),
    "no_queries": (2, 2, 0, 7, 3, 2),
    "no_keys": (2, 2, 5, 0, 3, 2),
    "no_batch": (0, 2, 5, 7, 3, 2),
    "no_width": (2, 2, 5, 7, 0, 0),
}


def names():
    """Every operator that the library registered, whatever it is."""
    found = torch._C._dispatch_get_all_op_names()
    return sorted({name.removeprefix("mha_ext::").split(".")[0] for name in found if name.startswith("mha_ext::")})


def fused_backward(first, options, grad_output, grad_weights, wanted, keep_weights=True):
    """Arguments of the backward that belong to a call of the forward. Row max and row sum must be the forward's own."""
    output, weights, row_max, row_sum = torch.ops.mha_ext.fused_attention(*first, True, True, *options)
    weights = None if grad_weights is None or not keep_weights else weights
    query, key, value, *numbers = first
    statistics = (output, row_max, row_sum)
    return (grad_output, query, key, value, *statistics, *numbers, *wanted, grad_weights, weights, *options)


def samples(sizes, layout, dtype=torch.float32):
    """{operator: [argument tuples]}: with all optional tensors and with none, and grouped heads where they can be."""
    batch, heads, lq, lk, d, dv = sizes
    kv_heads = max(1, heads // 2)

    def make(*shape, like=dtype):
        x = torch.randn(shape, dtype=torch.float64).to(like)
        return lay_out(x, layout)

    query, key, value = make(batch, heads, lq, d), make(batch, kv_heads, lk, d), make(batch, kv_heads, lk, dv)
    weights, scores = make(batch, heads, lq, lk).abs(), make(batch, heads, lq, lk)
    x, mean = make(batch, heads, lq, dv), make(batch, 1, lq, lk)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    mask = lay_out(torch.rand(batch, 1, lq, lk) < 0.7, layout)
    lengths = torch.full((batch, 1), max(lk - 1, 0))
    offsets = torch.ones(batch, 1, dtype=torch.int64)
    bias, sinks = make(1, heads, 1, lk), torch.randn(1, heads).to(dtype)
    sink_rows = torch.rand(batch, heads, lq, dtype=wide)
    nothing = (None, None, None, UNBOUNDED, UNBOUNDED, 0)
    everything = (mask, lengths, offsets, 3, 1, 1)
    fused = (
        ((query, key, value, 0.5, float("-inf"), UNBOUNDED), (None,) * 6 + (UNBOUNDED, 0, 0.0, 0.0)),
        ((query, key, value, 0.5, -3.0, 1), (bias, sinks, mask, lengths, offsets, torch.tensor(-5), 3, 1, 1.5, 0.3)),
    )
    return {
        "attention_scores": [(query, key, 0.5)],
        "attention_scores_out": [(query, key, 0.5, torch.zeros(batch, heads, lq, lk, dtype=dtype))],
        "weighted_sum": [(weights, value, 1.0)],
        "weighted_sum_out": [(weights, value, 1.0, torch.zeros(batch, heads, lq, dv, dtype=dtype))],
        "weighted_sum_over_queries": [(weights, x, kv_heads, 0.5), (weights, x, heads, 1.0)],
        "masked_softmax": [
            (scores, None, None, *nothing, 0.0, float("-inf")),
            (scores, bias, sinks, *everything, 1.5, -3.0),
        ],
        "masked_softmax_backward": [
            (weights, scores, None, None, None, *nothing, 0.0, float("-inf"), False),
            (weights, scores, sink_rows, None, scores, *everything, 1.5, -3.0, True),
            (weights, scores, sink_rows, sink_rows, None, *everything, 0.0, -3.0, False),
        ],
        "fused_attention": [
            (*fused[0][0], False, False),
            (*fused[0][0], True, False, *fused[0][1]),
            (*fused[1][0], True, True, *fused[1][1]),
            (*fused[1][0], True, True, *fused[1][1], True),
        ],
        "fused_attention_backward": [
            fused_backward(*fused[0], x, None, (True, True, True, False)),
            fused_backward(*fused[1], x, scores, (True, True, True, True)),
            fused_backward(*fused[1], x, mean, (True, True, False, False), keep_weights=False),
            fused_backward(*fused[1], x, None, (False, False, False, True)),
        ],
        "sum_over": [(scores, [0]), (scores, [1, 3]), (scores, [0, 1, 2, 3])],
        "dropout": [(weights, torch.tensor(5), 0.3), (weights, torch.tensor(-5), 1.0)],
        "keep_mask": [(mask,), (mask.float(),), (mask.to(torch.int32),)],
    }
