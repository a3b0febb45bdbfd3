"""torch.compile(fullgraph=True) forward and training, dynamic shapes, export: eager results, no graph break.

No level of the instruction set shows in a graph: it is compiled once and then runs on every level.
"""

import differentiable
import pytest
import torch
from cases import Case
from compare import expected
from levels import each_level
from tolerances import assert_rounding_only
from torch import func

import mha_ext

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")]

NAMES = (
    "plain",
    "mask",
    "bias_heads",
    "lower_right",
    "window",
    "softcap_bias",
    "sinks",
    "gqa",
    "mask_value_small",
    "blhd",
    "masked_softmax_all",
    "attention_scores_gqa",
    "weighted_sum",
)
FUNCTIONS = [f for f in differentiable.ALL if f.name in NAMES]
FEW = [f for f in FUNCTIONS if f.name in ("plain", "softcap_bias", "blhd")]


def loss_of(results):
    results = results if isinstance(results, tuple) else (results,)
    return sum((x.sin() * (n + 1)).sum() for n, x in enumerate(results))


def trained(call, function):
    leaves = function.leaves()
    return torch.autograd.grad(loss_of(call(*leaves)), leaves)


def check_on_every_level(compiled, function):
    for _ in each_level():
        got, want = compiled(*function.inputs), function.call(*function.inputs)
        assert_rounding_only(got, want, function.inputs, str(function))
        got, want = trained(compiled, function), trained(function.call, function)
        assert_rounding_only(got, want, function.inputs, str(function))


@pytest.mark.parametrize("function", FUNCTIONS, ids=str)
def test_aot_eager(function):
    compiled = torch.compile(function.call, backend="aot_eager", fullgraph=True)
    check_on_every_level(compiled, function)


@pytest.mark.parametrize("function", FEW, ids=str)
def test_inductor(function):
    compiled = torch.compile(function.call, fullgraph=True)
    check_on_every_level(compiled, function)


def with_everything(query, key, value, mask, bias, sinks, lengths):
    return mha_ext.attention(
        query,
        key,
        value,
        mask,
        bias=bias,
        is_causal=True,
        causal_offset="lower_right",
        softcap=2.0,
        key_lengths=lengths,
        sinks=sinks,
        window=(4, None),
    )


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_dynamic_shapes(backend):
    """One graph serves every length."""
    compiled = torch.compile(with_everything, backend=backend, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lq, lk in ((5, 7), (9, 6), (17, 30)):
            case = Case(
                dtype=torch.float64, batch=(3,), lq=lq, lk=lk, mask="full", bias="heads", sinks=True, key_lengths=True
            )
            query, key, value, o = case.build()
            leaves = [x.requires_grad_() for x in (query, key, value)]
            given = (*leaves, o["mask"], o["bias"].requires_grad_(), o["sinks"].requires_grad_(), o["key_lengths"])
            wrt = [*leaves, given[4], given[5]]
            for _ in each_level():
                got, want = compiled(*given), with_everything(*given)
                assert_rounding_only(got, want, leaves, str(case))
                grads, right = (torch.autograd.grad(loss_of(r), wrt) for r in (got, want))
                assert_rounding_only(grads, right, leaves, str(case))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "options",
    [lambda n: dict(is_causal=True, causal_offset=n), lambda n: dict(window=(n, n))],
    ids=["offset", "window"],
)
def test_dynamic_numbers(options, backend):
    """A position that grows, as in a loop over a key/value cache: one graph from the second call on."""

    def step(query, key, n):
        return mha_ext.attention(query, key, key, **options(n))[0]

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    query, key = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 19, 8)
    for n in (3, 4):
        torch.testing.assert_close(compiled(query, key, n), step(query, key, n))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n in (5, 6, 11):
            torch.testing.assert_close(compiled(query, key, n), step(query, key, n))


@pytest.mark.parametrize("training", [False, True])
def test_one_tensor_as_query_key_and_value(training):
    """Self-attention passes the same tensor three times; its gradient is the sum of the three."""
    function = next(f for f in differentiable.ALL if f.name == "plain")
    x = function.inputs[0].detach().requires_grad_(training)

    def call(x):
        return mha_ext.attention(x, x, x, is_causal=True)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for _ in each_level():
        got, want = compiled(x), call(x)
        assert_rounding_only(got, want, (x, x, x))
        if training:
            assert_rounding_only(*(torch.autograd.grad(loss_of(r), x) for r in (got, want)), (x, x, x))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_dropout(backend):
    """A compiled call with dropout: rows that were kept, scaled, and a backward that uses the forward's bits."""
    query, key, value, _ = Case(dtype=torch.float64, lq=33, lk=40).build()
    value.requires_grad_()
    compiled = torch.compile(lambda q, k, v: mha_ext.attention(q, k, v, dropout=0.5), backend=backend, fullgraph=True)
    for _ in each_level():
        output, weights = compiled(query, key, value)
        undropped = mha_ext.attention(query, key, value)[1]
        kept = weights != 0
        assert 0 < kept.double().mean() < 1
        assert_rounding_only(weights[kept], 2 * undropped.detach()[kept], (query, key))
        (grad,) = torch.autograd.grad(output.sum(), value)
        assert_rounding_only(grad, weights.detach().sum(-2)[..., None].expand_as(grad), (query, key, value))
        again = compiled(query, key, value)[1]
        assert not torch.equal(again != 0, kept)


def test_aot_eager_draws_the_seed_eager_draws():
    query, key, value, _ = Case(lq=33, lk=40).build()
    call = lambda q, k, v: mha_ext.attention(q, k, v, dropout=0.5)[1]  # noqa: E731
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for _ in each_level():
        torch.manual_seed(1)
        eager = call(query, key, value)
        torch.manual_seed(1)
        assert torch.equal(compiled(query, key, value), eager)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_low_precision_by_the_tolerance_rule(dtype, backend):
    case = Case(dtype=dtype, mask="full", is_causal=True, lq=20, lk=30, d=16)
    query, key, value, options = case.build()
    compiled = torch.compile(lambda q, k, v: mha_ext.attention(q, k, v, **options), backend=backend, fullgraph=True)
    right = expected(case)
    for _ in each_level():
        for name, got, n in zip(("output", "weights"), compiled(query, key, value), (0, 1), strict=True):
            right.same(name, got, right.want[n], right.plain[n])


@pytest.mark.parametrize("module", ["attention", "multi_head"])
def test_modules(module):
    layer = mha_ext.SelfAttention(0.0) if module == "attention" else mha_ext.MultiHeadAttention(16, 4, dropout=0.0)
    layer = layer.double()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    mask = torch.tril(torch.ones(5, 5))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for _ in each_level():
        assert_rounding_only(compiled(x, x, x, mask), layer(x, x, x, mask), (x, x, x))
        if module == "multi_head":
            weights = list(layer.parameters())
            grads = [torch.autograd.grad(loss_of(f(x, x, x, mask)), weights) for f in (compiled, layer)]
            assert_rounding_only(*grads, (x, *weights))


TRANSFORMED = {
    "grad": lambda call: lambda *x: func.grad(lambda *y: loss_of(call(*y)), argnums=(0, 1, 2))(*x),
    "jvp": lambda call: lambda *x: func.jvp(call, x, tuple(torch.ones_like(y) for y in x))[1],
    "vmap": lambda call: lambda *x: func.vmap(call)(*x),
    "vmap_grad": lambda call: lambda *x: func.vmap(func.grad(lambda *y: loss_of(call(*y))))(*x),
    "jacrev": lambda call: lambda *x: func.jacrev(lambda *y: call(*y)[0])(*x),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transforms_inside(name):
    """torch.func inside of a compiled function: never the silent zeros that Dynamo makes of a custom jvp."""
    function = next(f for f in differentiable.ALL if f.name == "plain")
    inputs = function.inputs if "vmap" not in name else tuple(torch.stack([x, -x]) for x in function.inputs)
    transformed = TRANSFORMED[name](function.call)
    compiled = torch.compile(transformed, backend="aot_eager", fullgraph=True)
    for _ in each_level():
        assert_rounding_only(compiled(*inputs), transformed(*inputs), inputs, name)


class Exported(torch.nn.Module):
    def forward(self, query, key, value, mask):
        return mha_ext.attention(query, key, value, mask, is_causal=True, softcap=3.0)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_export(strict, dynamic):
    def inputs(lq, lk):
        query, key, value, options = Case(dtype=torch.float64, batch=(3,), lq=lq, lk=lk, mask="full").build()
        return query, key, value, options["mask"]

    shapes = None
    if dynamic:
        rows, keys = torch.export.Dim("rows", min=2), torch.export.Dim("keys", min=2)
        shapes = {"query": {2: rows}, "key": {2: keys}, "value": {2: keys}, "mask": {2: rows, 3: keys}}
    program = torch.export.export(Exported(), inputs(5, 7), strict=strict, dynamic_shapes=shapes)
    for sizes in ((5, 7), (9, 4)) if dynamic else ((5, 7),):
        given = inputs(*sizes)
        for _ in each_level():
            assert_rounding_only(program.module()(*given), Exported()(*given), given[:3])
    operators = {str(node.target) for node in program.graph.nodes}
    assert "mha_ext.fused_attention.default" in operators


def test_fake_tensors_see_the_layout():
    """Under FakeTensorMode shapes, dtypes and strides are those of a real call."""
    query, key, value, _ = Case(layout="blhd", kv_heads=1).build()
    real = mha_ext.attention(query, key, value, enable_gqa=True)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mha_ext.attention(*(mode.from_tensor(x) for x in (query, key, value)), enable_gqa=True)
    for r, f in zip(real, fake, strict=True):
        assert (r.shape, r.dtype, r.stride()) == (f.shape, f.dtype, f.stride())


def test_symbolic_numbers():
    """Numbers that change from call to call become symbolic; the checks must not break the graph."""
    query = torch.randn(1, 1, 2, 4, dtype=torch.float64)

    def call(q, scale, softcap, mask_value):
        return mha_ext.attention(q, q, q, is_causal=True, scale=scale, softcap=softcap, mask_value=mask_value)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for _ in each_level():
        for x in (0.5, 0.75, 1.25):
            assert_rounding_only(compiled(query, x, x + 1, -x), call(query, x, x + 1, -x), (query,))


def test_mask_value_beyond_float16_in_a_compiled_transform():
    """torch.func inside of torch.compile runs plain torch, where -1e9 must not become -inf."""
    scores, mask = torch.tensor([[0.0, 1.0, 2.0]]).half(), torch.zeros(1, 3, dtype=torch.bool)

    def softmax(s):
        return mha_ext.masked_softmax(s, mask, mask_value=-1e9)

    compiled = torch.compile(torch.func.vmap(softmax), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(scores[None]), torch.func.vmap(softmax)(scores[None]))
    assert torch.equal(compiled(scores[None]), torch.full((1, 1, 3), 1 / 3).half())
