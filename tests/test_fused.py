"""The fused operator against its second opinion, the three steps, and against the float64 oracle: every option."""

import functools
import itertools

import cases
import oracle
import pytest
import torch
from cases import Case
from compare import Expected, expected, run, seed_drawn_from
from hypothesis import given, settings
from hypothesis import strategies as st
from test_properties import SETTINGS, any_case
from tolerances import assert_rounding_only, assert_same_bits
from torch.utils._python_dispatch import TorchDispatchMode

import mha_ext
from mha_ext import ops


def by_steps(case, query, key, value, **options):
    """mha_ext.attention with a dropout function, which makes it take the three steps; the bits are those of `case`."""
    seed = torch.tensor(seed_drawn_from(torch.Generator().manual_seed(case.seed).get_state()))

    def drop(weights):
        full = weights if weights.dim() > 3 else weights[(slice(None), None) if weights.dim() == 3 else (None, None)]
        return mha_ext.rules_steps.dropout(full, seed, case.dropout).reshape(weights.shape)

    return mha_ext.attention(query, key, value, dropout=drop if case.dropout else lambda w: w, **options)


class Calls(TorchDispatchMode):
    """Notes the mha_ext operators that run, with their arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "mha_ext":
            self.calls.append((func._opname, args))
        return func(*args, **(kwargs or {}))

    @property
    def names(self):
        return [name for name, _ in self.calls]


@settings(SETTINGS, max_examples=250)
@given(any_case(), st.sampled_from(mha_ext.supported_isas()), st.booleans())
def test_equals_the_steps_and_the_oracle(case, isa, need_weights):
    """Output, weights and all gradients of both ways by the tolerance rule; in float64 also against each other."""
    mha_ext.set_isa(isa)
    query, key, value, options = case.build()
    tensors = {"query": query, "key": key, "value": value}
    right = Expected(case, tensors, options, through_weights=need_weights)
    got = right.check(need_weights)
    grads = right.grads if need_weights else (right.grads[0], None)
    steps = run(lambda *a, **o: by_steps(case, *a, **o), right.tensors, right.options, grads)
    for n, name in enumerate(("output", "weights")[: 1 + need_weights]):
        right.same(name, steps[n], right.want[n], right.plain[n])
    for name, grad in steps[2].items():
        right.same(name, grad, right.want[2][name], right.plain[2][name])
    if case.dtype == torch.float64:
        inputs = list(right.tensors.values())
        assert_rounding_only(got[: 1 + need_weights], steps[: 1 + need_weights], inputs, str(case))
    if need_weights and case.dropout and case.dtype != torch.float16:  # where a small weight may round to 0
        assert torch.equal(got[1] == 0, steps[1] == 0), case


def test_it_is_one_operator():
    """A call runs the fused operator and nothing else; so does its backward. A dropout function takes the steps."""
    query, key, value, options = Case(mask="full", bias="heads", sinks=True).build()
    leaves = [x.requires_grad_() for x in (query, key, value, options["bias"])]
    for extra in ({}, {"dropout": 0.3}, {"need_weights": False}):
        with Calls() as forward:
            output = mha_ext.attention(query, key, value, **options, **extra)[0]
        with Calls() as backward:
            torch.autograd.grad(output.sum(), leaves)
        assert (forward.names, backward.names) == (["fused_attention"], ["fused_attention_backward"])
    with Calls() as forward:
        mha_ext.scaled_dot_product_attention(query, key, value, options["mask"])
    assert forward.names == ["fused_attention"]
    with Calls() as forward:
        mha_ext.attention(query, key, value, dropout=lambda w: w)
    assert forward.names == ["attention_scores", "masked_softmax", "weighted_sum"]


def test_weights_nobody_differentiates_cost_nothing():
    """No matrix of zeros is made for them, and one wanted gradient asks for no other."""
    query, key, value, _ = Case().build()
    key.requires_grad_()
    output, weights = mha_ext.attention(query, key, value)
    with Calls() as backward:
        torch.autograd.grad(output.sum(), key, retain_graph=True)
    ((_, arguments),) = backward.calls
    assert len(arguments) == 14  # neither weights nor their gradient
    assert arguments[10:] == (False, True, False, False)
    with Calls() as backward:
        torch.autograd.grad(weights.sum(), key)
    ((_, arguments),) = backward.calls
    assert all(x is not None for x in arguments[14:16])
    assert (arguments[0] == 0).all()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("through", [("output",), ("weights",), ("output", "weights")], ids="+".join)
@pytest.mark.parametrize("options", [{}, dict(dropout=0.4), dict(bias="heads", softcap=2.0, sinks=True)], ids=str)
def test_gradients_through_output_and_weights(options, through):
    case = Case(dtype=torch.float64, lq=21, lk=37, d=16, mask="full", **options)
    query, key, value, given = case.build()
    tensors = {"query": query, "key": key, "value": value}
    tensors |= {n: given.pop(n) for n in ("bias", "sinks") if n in given}
    right = expected(case)
    grads = tuple(g if name in through else None for g, name in zip(right.grads, ("output", "weights"), strict=True))
    drop = {"dropout": case.dropout} if case.dropout else {}
    torch.manual_seed(case.seed)
    fused = run(lambda *a, **o: mha_ext.attention(*a, **o, **drop), tensors, given, grads)
    steps = run(lambda *a, **o: by_steps(case, *a, **o), tensors, given, grads)
    for name, grad in fused[2].items():
        assert_rounding_only(grad, steps[2][name], tensors.values(), name)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("ones", list(itertools.product((False, True), repeat=4)), ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_bias_gradient_of_every_broadcast_shape(ones, dtype, softcap):
    """The gradient has the bias's own shape, summed over what is broadcast; grouped heads, softcap and a mask too."""
    for expected_of_bias in with_biases(dtype, ones, softcap):
        expected_of_bias.check(need_weights=False)


# With and without softcap: by a pass of its own, and on the way to the other gradients.
@functools.cache  # for all levels
def with_biases(dtype, ones, softcap):
    case = Case(dtype=dtype, batch=(2,), heads=4, kv_heads=2, lq=19, lk=35, d=8, mask="full", softcap=softcap)
    query, key, value, options = case.build()
    shape = [1 if one else size for one, size in zip(ones, (2, 4, 19, 35), strict=True)]
    bias = case.randn("bias", shape)
    given = [bias, bias[0, 0]] if shape[:2] == [1, 1] else [bias]
    tensors = {"query": query, "key": key, "value": value}
    return [Expected(case, tensors, {**options, "bias": each}, through_weights=False) for each in given]


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kv_heads", [1, 3, 6])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_sinks_gradient(dtype, kv_heads):
    case = Case(dtype=dtype, heads=6, kv_heads=kv_heads, lq=40, lk=33, d=16, sinks=True, is_causal=True, dropout=0.2)
    expected(case, through_weights=False).check(need_weights=False)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(
    ("dtype", "bias", "options"),
    [
        (torch.float32, "full", dict(is_causal=True)),
        (torch.bfloat16, "full", dict(window=(20, 7), dropout=0.2)),
        (torch.float64, "heads", dict(window=(20, 7), dropout=0.2)),
        (torch.bfloat16, "heads", {}),
        (torch.float16, "heads", dict(is_causal=True)),
        (torch.float32, "shared", {}),
    ],
    ids=str,
)
def test_bias_gradient_where_keys_and_queries_are_cut(dtype, bias, options):
    """Each head with a bias of its own, batch entries that share it, and all heads; whole blocks are hidden."""
    case = Case(dtype=dtype, batch=(2,), heads=4, lq=300, lk=290, d=16, bias=bias, **options)
    expected(case, through_weights=False).check(need_weights=False)


def test_bias_gradient_by_itself_and_with_the_others():
    """Where nothing is summed, the pass of its own and the way to the others give the same bits."""
    case = Case(batch=(2,), heads=3, lq=300, lk=290, d=40, bias="full", mask="full")
    query, key, value, options = case.build()
    bias = options.pop("bias").requires_grad_()
    for wanted in ([query], [key], [value], [query, key, value]):
        leaves = [x.requires_grad_(any(x is y for y in wanted)) for x in (query, key, value)]
        output, _ = mha_ext.attention(*leaves, **options, bias=bias, need_weights=False)
        together = torch.autograd.grad(output.square().sum(), [bias, *wanted])[0]
        alone, _ = mha_ext.attention(*(x.detach() for x in leaves), **options, bias=bias, need_weights=False)
        assert_same_bits(together, torch.autograd.grad(alone.square().sum(), bias)[0], f"{len(wanted)} others")


# Larger than one task each way, so that work is split and masks meet the edges of tiles.
LONG = cases.pairwise(
    dtype=cases.DTYPES,
    size=(
        dict(lq=130, lk=300, d=32),
        dict(lq=300, lk=130, d=64),
        dict(lq=1, lk=1100, d=64),
        dict(lq=257, lk=257, d=40),
        dict(lq=70, lk=90, d=200),
    ),
    options=(
        {},
        dict(is_causal=True),
        dict(is_causal=True, causal_offset="lower_right", key_lengths=True),
        dict(window=(40, 7), bias="per_key"),
        dict(mask="full", dropout=0.2, softcap=4.0),
        dict(mask="per_key", bias="heads", sinks=True, mask_value=-1e4),
    ),
    heads=(dict(heads=1), dict(heads=4, kv_heads=2)),
    layout=("contiguous", "blhd"),
    need_weights=(False, True),
)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("row", LONG, ids=lambda r: f"{r['dtype']},{r['size']},{r['options']},{r['need_weights']}")
def test_long(row):
    case = Case(**row["size"], **row["options"], **row["heads"], dtype=row["dtype"], layout=row["layout"], batch=(1,))
    expected(case, through_weights=row["need_weights"]).check(row["need_weights"])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
def test_dropout_bits_with_and_without_weights(dtype, p):
    """With the identity as values the output is the weights: what is 0 tells the bits, whether weights come or not."""
    shape = (2, 3, 21, 45)
    query, key = torch.zeros(2, 3, 21, 8, dtype=dtype), torch.zeros(2, 1, 45, 8, dtype=dtype)
    value = torch.eye(45, dtype=dtype).expand(2, 1, 45, 45)
    torch.manual_seed(5)
    keep = oracle.keep_mask(seed_drawn_from(torch.get_rng_state()), p, shape)
    for need_weights in (True, False):
        torch.manual_seed(5)
        output, weights = mha_ext.attention(query, key, value, dropout=p, enable_gqa=True, need_weights=need_weights)
        assert torch.equal(output != 0, keep)
        assert (weights is not None) == need_weights
        if need_weights:
            assert torch.equal(weights != 0, keep)


def test_the_value_may_have_more_batch_entries():
    """They share weights, and with them dropout bits: what the three steps make of such a call."""
    case = Case(dtype=torch.float64, batch=(1,))
    query, key, value, _ = case.build()
    values = torch.cat([value, -value, 2 * value])
    output, weights = mha_ext.attention(query, key, values, dropout=0.5)
    assert weights.shape == (1, 2, 5, 7)
    assert_rounding_only(output, weights @ values, (query, key, values))
    alone, none = mha_ext.attention(query, key, values, need_weights=False)
    assert none is None
    assert_rounding_only(alone, mha_ext.attention(query, key, values)[0], (query, key, values))


SELF = {
    "one tensor": lambda x: (x, x, x),
    "key from query": lambda x: (x, x.sin(), x),
    "all from one": lambda x: (x * 2, x.cos(), x.square()),
}


@pytest.mark.parametrize("inputs", SELF.values(), ids=SELF)
def test_second_derivative_where_inputs_depend_on_each_other(inputs):
    """The backward differentiates with respect to each argument by itself."""
    x = torch.randn(1, 2, 4, 3, dtype=torch.float64, requires_grad=True)

    def second(attention):
        (first,) = torch.autograd.grad(attention(*inputs(x))[0].sin().sum(), x, create_graph=True)
        return first, torch.autograd.grad(first.cos().sum(), x)[0]

    case = Case(dtype=torch.float64)
    assert_rounding_only(second(mha_ext.attention), second(lambda *a: by_steps(case, *a)), (x,))


def test_gradient_with_a_graph_is_the_gradient_without():
    case = Case(dtype=torch.float64, mask="full", bias="per_key", sinks=True, softcap=2.0, kv_heads=1)
    query, key, value, options = case.build()
    leaves = [x.requires_grad_() for x in (query, key, value, options["bias"], options["sinks"])]
    output, weights = mha_ext.attention(query, key, value, **options)
    loss = output.sin().sum() + weights.square().sum()
    plain, graph = (torch.autograd.grad(loss, leaves, retain_graph=True, create_graph=c) for c in (False, True))
    assert_rounding_only(graph, plain, leaves)
    assert all(g.requires_grad for g in graph)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_for_any_number_of_threads(dtype):
    """Tasks of unlike length, taken one by one: causal, grouped heads, without weights, forward and backward."""
    case = Case(dtype=dtype, batch=(1,), heads=4, kv_heads=2, lq=520, lk=520, d=32, is_causal=True, bias="per_key")
    query, key, value, options = case.build()
    leaves = [x.requires_grad_() for x in (query, key, value, options["bias"])]
    results = []
    for threads in (1, 2, 3, 2):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        output, _ = mha_ext.attention(query, key, value, **options, dropout=0.1, need_weights=False)
        results.append((output, *torch.autograd.grad(output, leaves, case.randn("go", output.shape))))
    for other in results[1:]:
        for a, b in zip(other, results[0], strict=True):
            assert_same_bits(a, b)


def test_statistics_are_made_for_a_backward_only():
    query, key, value, _ = Case().build()
    with Calls() as calls:
        mha_ext.attention(query, key, value)
        mha_ext.attention(query.requires_grad_(), key, value)
        with torch.no_grad():
            mha_ext.attention(query, key, value)
    assert [arguments[7] for _, arguments in calls.calls] == [False, True, False]
    output, weights, row_max, row_sum = ops.fused_attention(*calls.calls[1][1])
    assert output.shape == (2, 2, 5, 8)
    assert weights.shape == (2, 2, 5, 7)
    assert row_max.shape == row_sum.shape == (2, 2, 5)
