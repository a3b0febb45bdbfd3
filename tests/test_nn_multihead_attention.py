"""mha_ext.nn.MultiheadAttention against torch's and, where that raises or gives NaN, against plain arithmetic."""

import itertools
import math

import pytest
import torch
from levels import each_level
from multihead import BATCH, HEADS, LK, LQ, WIDTH, float_mask, inputs, pair, plain, randn
from tolerances import assert_rounding_only

PADDING = torch.arange(LK) >= torch.tensor([[LK], [4]])
CAUSAL = torch.ones(LQ, LK, dtype=torch.bool).triu(1)
PER_HEAD = torch.rand(BATCH * HEADS, LQ, LK, generator=torch.Generator().manual_seed(1)) < 0.3
PER_HEAD[..., 0] = False
ADDED = torch.randn(LQ, LK, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
MASKS = {
    "none": {},
    "padding": {"key_padding_mask": PADDING},
    "float_padding": {"key_padding_mask": float_mask(PADDING) + ADDED[0]},
    "mask": {"attn_mask": CAUSAL},
    "float_mask": {"attn_mask": float_mask(CAUSAL) + ADDED},
    "mask_per_head": {"attn_mask": PER_HEAD},
    "float_mask_per_head": {"attn_mask": float_mask(PER_HEAD)},
    "both": {"key_padding_mask": PADDING, "attn_mask": CAUSAL},
    "both_float": {"key_padding_mask": float_mask(PADDING), "attn_mask": float_mask(PER_HEAD)},
    "causal_hint": {"attn_mask": CAUSAL, "is_causal": True},
    "causal_hint_padding": {"key_padding_mask": PADDING, "attn_mask": CAUSAL, "is_causal": True},
}
OPTIONS = {
    "usual": {},
    "sequence_first": {"batch_first": False},
    "no_bias": {"bias": False},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True, "batch_first": False},
    "both_added": {"add_bias_kv": True, "add_zero_attn": True},
    "widths": {"kdim": 5, "vdim": 9},
    "widths_sequence_first": {"kdim": 5, "batch_first": False, "bias": False, "add_bias_kv": True},
}


def results_and_gradients(module, given, masks, **options):
    masks = {
        n: m.clone().requires_grad_() if n == "attn_mask" and m.is_floating_point() else m for n, m in masks.items()
    }
    output, weights = module(*given, **masks, **options)
    learned = [x for x in masks.values() if torch.is_tensor(x) and x.requires_grad]
    loss = output.sin().sum() + (0 if weights is None else weights.square().sum())
    grads = torch.autograd.grad(loss, [*given, *module.parameters(), *learned], allow_unused=True)
    return [x for x in (output, weights, *grads) if x is not None]


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_same_as_torch(options, masks):
    """Output, weights and the gradients of inputs, parameters and additive masks, on every level."""
    options = {"batch_first": True, **options}
    theirs, ours = pair(**options)
    given = inputs(**{n: options[n] for n in ("batch_first", "kdim", "vdim") if n in options})
    for average in (True, False):
        want = results_and_gradients(theirs, given, masks, average_attn_weights=average)
        for _ in each_level():
            got = results_and_gradients(ours, given, masks, average_attn_weights=average)
            assert_rounding_only(got, want, [*given, *ours.parameters()])
    torch_takes_it = "is_causal" not in masks or not (options.get("add_bias_kv") or options.get("add_zero_attn"))
    want = results_and_gradients(
        theirs, given, masks if torch_takes_it else {**masks, "is_causal": False}, need_weights=False
    )
    got = results_and_gradients(ours, given, masks, need_weights=False)
    assert_rounding_only(got, want, [*given, *ours.parameters()])


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}, {"kdim": 5, "vdim": 9}], ids=str)
@pytest.mark.parametrize(
    "masks",
    [{}, {"key_padding_mask": PADDING[1]}, {"attn_mask": CAUSAL}, {"attn_mask": PER_HEAD[:HEADS]},
     {"key_padding_mask": float_mask(PADDING[1]), "attn_mask": float_mask(CAUSAL)}],
    ids=("none", "padding", "mask", "per_head", "both_float"),
)  # fmt: skip
def test_without_a_batch(masks, options, average):
    for batch_first in (False, True):
        theirs, ours = pair(batch_first=batch_first, **options)
        given = inputs(batched=False, **{n: options[n] for n in ("kdim", "vdim") if n in options})
        got, want = (results_and_gradients(m, given, masks, average_attn_weights=average) for m in (ours, theirs))
        assert_rounding_only(got, want, [*given, *ours.parameters()])


@pytest.mark.parametrize("shared", ["all", "key_and_value", "query_and_key"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_one_tensor_for_several_inputs(shared, batch_first):
    """Self-attention and attention to a memory, which take fewer and larger products."""
    theirs, ours = pair(batch_first=batch_first)
    x, y = randn(BATCH, LQ, WIDTH).requires_grad_(), randn(BATCH, LQ, WIDTH).requires_grad_()
    given = {"all": (x, x, x), "key_and_value": (x, y, y), "query_and_key": (x, x, y)}[shared]
    used = [x] if shared == "all" else [x, y]
    results = []
    for module in (ours, theirs):
        output, weights = module(*given)
        grads = torch.autograd.grad(output.sin().sum() + weights.square().sum(), [*used, *module.parameters()])
        results.append((output, weights, *grads))
    assert_rounding_only(*results, (x, y, *ours.parameters()))


MIXED = {
    "causal": {"is_causal": True},
    "causal_padding": {"is_causal": True, "key_padding_mask": PADDING},
    "causal_float_padding": {"is_causal": True, "key_padding_mask": float_mask(PADDING)},
    "bool_and_float": {"key_padding_mask": PADDING, "attn_mask": ADDED},
    "float_and_bool": {"key_padding_mask": float_mask(PADDING), "attn_mask": PER_HEAD},
    "hint_is_no_substitute": {"is_causal": True, "attn_mask": PER_HEAD},
    "all_padding": {"key_padding_mask": torch.tensor([[False] * LK, [True] * LK])},
    "all_padding_float": {"key_padding_mask": float_mask(torch.tensor([[False] * LK, [True] * LK]))},
    "empty_rows": {"attn_mask": torch.ones(LQ, LK, dtype=torch.bool).tril()},
    "empty_rows_float": {"attn_mask": float_mask(torch.ones(LQ, LK, dtype=torch.bool).tril())},
    "all": {"is_causal": True, "key_padding_mask": ~PADDING, "attn_mask": float_mask(PER_HEAD)},
}


@pytest.mark.parametrize("masks", MIXED.values(), ids=MIXED)
def test_same_as_the_definition(masks):
    """What torch refuses or answers with NaN: causality without a mask, masks of two kinds, rows that see nothing."""
    ours = pair(batch_first=True)[1]
    given = inputs()
    wrt = [*given, *ours.parameters()]
    want_output, want_weights = plain(ours, *given, **masks)
    for average, _ in itertools.product((True, False), each_level()):
        output, weights = ours(*given, **masks, average_attn_weights=average)
        want = want_output, want_weights.mean(1) if average else want_weights
        assert_rounding_only((output, weights), want, wrt)
        grads = [
            torch.autograd.grad(o.sin().sum() + w.square().sum(), wrt, retain_graph=True)
            for o, w in ((output, weights), want)
        ]
        assert all(torch.isfinite(g).all() for g in grads[0])
        assert_rounding_only(*grads, wrt)


def test_added_keys_are_seen_under_causality():
    """torch pads its masks so that every query sees the appended keys; so they stay visible with is_causal alone."""
    theirs, ours = pair(add_bias_kv=True, add_zero_attn=True, batch_first=True)
    given = inputs()
    for masks in ({}, {"key_padding_mask": PADDING}):
        got, want = ours(*given, **masks, is_causal=True), theirs(*given, **masks, attn_mask=CAUSAL)
        assert got[1].shape == (BATCH, LQ, LK + 2)
        assert (got[1][:, 0, -2:] > 0).all()
        assert_rounding_only(got, want, given)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_hidden_nan_cannot_show(kind):
    ours = pair(batch_first=True)[1]
    query, key, value = (x.detach() for x in inputs())
    mask = PADDING if kind == "bool" else float_mask(PADDING)
    want = ours(query, key, value, mask)
    key[PADDING], value[PADDING] = math.nan, math.inf
    got = ours(query, key, value, mask)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend):
    ours = pair(batch_first=True, add_bias_kv=True)[1]
    given = inputs()
    wrt = [*given, *ours.parameters()]
    compiled = torch.compile(ours, backend=backend, fullgraph=True)
    for masks in ({}, {"key_padding_mask": float_mask(PADDING), "is_causal": True}):
        results = [f(*given, **masks) for f in (compiled, ours)]
        assert_rounding_only(*results, wrt)
        assert_rounding_only(
            *(torch.autograd.grad(o.sin().sum() + w.sum(), wrt, allow_unused=True)[:4] for o, w in results), wrt
        )


def test_second_derivatives():
    ours = pair(batch_first=True)[1]
    given = inputs()
    assert torch.autograd.gradgradcheck(lambda *x: ours(*x, key_padding_mask=PADDING), given, fast_mode=True)
