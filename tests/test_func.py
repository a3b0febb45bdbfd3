"""torch.func: grad, vjp, jvp, vmap, jacrev, jacfwd, hessian of each operator and option, against plain torch."""

import dataclasses

import differentiable
import pytest
import torch
from cases import Case
from tolerances import assert_rounding_only
from torch import func
from torch.autograd import forward_ad as fwAD

import mha_ext

pytestmark = pytest.mark.usefixtures("isa")

every_function = pytest.mark.parametrize("function", differentiable.ALL, ids=str)


def loss_of(call):
    def loss(*inputs):
        results = call(*inputs)
        results = results if isinstance(results, tuple) else (results,)
        return sum((x.sin() * (n + 1)).sum() for n, x in enumerate(results))

    return loss


def arguments(function):
    return tuple(range(len(function.inputs)))


@every_function
def test_grad(function):
    got, want = (
        func.grad(loss_of(f), argnums=arguments(function))(*function.inputs) for f in (function.call, function.plain)
    )
    assert_rounding_only(got, want, function.inputs, str(function))


@every_function
def test_jvp(function):
    tangents = tuple(torch.randn_like(x) for x in function.inputs)
    got, want = (func.jvp(f, function.inputs, tangents) for f in (function.call, function.plain))
    assert_rounding_only(got[0], want[0], function.inputs, str(function))
    assert_rounding_only(got[1], want[1], function.inputs, str(function))


@every_function
def test_vjp(function):
    results, pull = func.vjp(function.call, *function.inputs)
    _, plain_pull = func.vjp(function.plain, *function.inputs)
    cotangents = torch.utils._pytree.tree_map(torch.randn_like, results)
    assert_rounding_only(pull(cotangents), plain_pull(cotangents), function.inputs, str(function))


@every_function
def test_jacrev_and_jacfwd_agree(function):
    def vector(*inputs):
        results = function.call(*inputs)
        return results[0] if isinstance(results, tuple) else results

    by_rows, by_columns = (
        func.jacrev(vector, 0)(*function.inputs),
        func.jacfwd(vector, 0, randomness="same")(*function.inputs),
    )
    assert_rounding_only(by_rows, by_columns, function.inputs, str(function))


@pytest.mark.parametrize("function", differentiable.WITHOUT_DROPOUT, ids=str)
def test_hessian(function):
    got, want = (func.hessian(loss_of(f), argnums=0)(*function.inputs) for f in (function.call, function.plain))
    assert_rounding_only(got, want, function.inputs, str(function))


@pytest.mark.parametrize("name", ["dropout", "everything"])
def test_hessian_with_dropout(name):
    """func.hessian has no `randomness`; written out it is jacfwd over jacrev (for plain torch: jacrev twice)."""
    function = next(f for f in differentiable.ATTENTION if f.name == name)
    got = func.jacfwd(func.jacrev(loss_of(function.call)), randomness="same")(*function.inputs)
    want = func.jacrev(func.jacrev(loss_of(function.plain)))(*function.inputs)
    assert_rounding_only(got, want, function.inputs, name)


@every_function
def test_hessian_vector_product_forward_over_reverse(function):
    tangents = tuple(torch.randn_like(x) for x in function.inputs)

    def hvp(call):
        return func.jvp(func.grad(loss_of(call), argnums=arguments(function)), function.inputs, tangents)[1]

    assert_rounding_only(hvp(function.call), hvp(function.plain), function.inputs, str(function))


@every_function
def test_reverse_over_forward(function):
    tangents = tuple(torch.randn_like(x) for x in function.inputs)

    def slope(call):
        return lambda *inputs: func.jvp(loss_of(call), inputs, tangents)[1]

    got, want = (
        func.grad(slope(f), argnums=arguments(function))(*function.inputs) for f in (function.call, function.plain)
    )
    assert_rounding_only(got, want, function.inputs, str(function))


@every_function
def test_vmap_over_everything(function):
    """A new leading dimension on every input, at dimension 0 or last."""
    stacks = [torch.stack([x, 2 * x, -x]) for x in function.inputs]
    want = [function.call(*(s[n] for s in stacks)) for n in range(3)]
    tangled = [s.movedim(0, -1) for s in stacks]
    for got in (
        func.vmap(function.call, randomness="same")(*stacks),
        func.vmap(function.call, in_dims=-1, randomness="same")(*tangled),
    ):
        assert_each(got, want, function)


@every_function
def test_vmap_over_one_input(function):
    """in_dims=None for all inputs but one, each in turn."""
    for n in arguments(function):
        stack = torch.stack([function.inputs[n], 2 * function.inputs[n]], dim=1)
        in_dims = tuple(1 if m == n else None for m in arguments(function))
        given = [[x if m != n else stack.select(1, k) for m, x in enumerate(function.inputs)] for k in range(2)]
        batched = [x if m != n else stack for m, x in enumerate(function.inputs)]
        got = func.vmap(function.call, in_dims=in_dims, randomness="same")(*batched)
        assert_each(got, [function.call(*g) for g in given], function)


@every_function
def test_per_sample_gradients(function):
    """vmap over grad, as differential privacy and ensembles use it."""
    stack = torch.stack([function.inputs[0], -function.inputs[0]])
    in_dims = (0, *(None for _ in function.inputs[1:]))
    gradient = func.grad(loss_of(function.call), argnums=arguments(function))
    got = func.vmap(gradient, in_dims=in_dims, randomness="same")(stack, *function.inputs[1:])
    assert_each(got, [gradient(x, *function.inputs[1:]) for x in stack], function)


def assert_each(got, want, function):
    """Each slice of a vmapped result against its own call."""
    got = got if isinstance(got, tuple) else (got,)
    for n, one in enumerate(want):
        one = one if isinstance(one, tuple) else (one,)
        assert_rounding_only(tuple(x[n] for x in got), one, function.inputs, f"{function}, entry {n}")


@pytest.mark.parametrize("name", ["mask", "bias", "sinks", "key_lengths", "causal_offset"])
def test_vmap_over_an_option(name):
    """Masks, lengths and offsets may be what is mapped over, while query, key and value are shared."""
    case = Case(**differentiable.TINY, mask="full", bias="full", sinks=True, key_lengths=True, causal_offset="tensor")
    query, key, value, options = case.build()
    other = dataclasses.replace(case, seed=1).options()
    stack = torch.stack([options[name], other[name]])

    def call(option):
        return mha_ext.attention(query, key, value, is_causal=True, **{**options, name: option})

    got = func.vmap(call)(stack)
    for n in range(2):
        assert_rounding_only(tuple(x[n] for x in got), call(stack[n]), (query, key, value), f"{name} {n}")


@pytest.mark.parametrize("name", ["plain", "dropout"])
def test_nested_vmap(name):
    function = next(f for f in differentiable.ATTENTION if f.name == name)
    stacks = [torch.stack([torch.stack([x, -x, 2 * x]), torch.stack([x + 1, x, x - 1])]) for x in function.inputs]
    got = func.vmap(func.vmap(function.call, randomness="same"), randomness="same")(*stacks)
    for m in range(2):
        assert_each(tuple(x[m] for x in got), [function.call(*(s[m, n] for s in stacks)) for n in range(3)], function)


def test_vmap_randomness_different_gives_each_entry_its_own_bits():
    query, key, value, _ = Case(lq=17, lk=17).build()

    def call(query):
        return mha_ext.attention(query, key, value, dropout=0.5)[1]

    weights = func.vmap(call, randomness="different")(torch.stack([query, query]))
    assert not torch.equal(weights[0] == 0, weights[1] == 0)
    weights = func.vmap(call, randomness="same")(torch.stack([query, query]))
    assert torch.equal(weights[0], weights[1])
    with pytest.raises(RuntimeError, match="randomness"):
        func.vmap(call)(torch.stack([query, query]))


def test_probe_of_functorch_transforms():
    """mha_ext asks torch this private question; should a release change the answer, this says so."""
    seen = []

    def look(x):
        seen.append(torch._C._are_functorch_transforms_active())
        return x.sum()

    x = torch.ones(3)
    look(x)
    func.grad(look)(x)
    func.jvp(look, (x,), (x,))
    func.vmap(look)(x[:, None])
    look(x)
    assert seen == [False, True, True, True, False]


def test_probe_of_forward_mode():
    assert fwAD._current_level == -1
    with fwAD.dual_level():
        assert fwAD._current_level >= 0
    assert fwAD._current_level == -1


def test_probes_under_compile(fresh_compiler):
    """Dynamo traces both probes right: inside and outside of a transform, and inside of a dual level."""

    def probe(x):
        return x + 1 if torch._C._are_functorch_transforms_active() or fwAD._current_level >= 0 else x + 2

    def transformed(x):
        return func.vmap(probe)(x)

    def compiled(function):
        return torch.compile(function, backend="aot_eager", fullgraph=True)

    x = torch.zeros(3)
    assert torch.equal(compiled(probe)(x), x + 2)
    assert torch.equal(compiled(transformed)(x), x + 1)

    def differentiated(x):
        return func.grad(lambda y: (probe(y) * y).sum())(x)

    assert torch.equal(compiled(differentiated)(x), x + 1)


@pytest.mark.parametrize("size", [5.0, 8.0, 12.0])
@pytest.mark.parametrize("softcap", [1.0, 2.0])
def test_saturated_softcap_is_as_exact_as_autograd(softcap, size):
    """Where tanh is nearly 1, 1 - tanh^2 in float32 has lost its digits; every route has to know better.

    The error is relative to each number: a logit that is off by a few units leaves a slope of about
    4 exp(-2 s / softcap) off by as many units times its own size.
    """
    scores = size + torch.rand(1, 1, 4, 6)
    x = scores.double().requires_grad_()
    probe = torch.randn(1, 1, 4, 6)
    slope = 1 / torch.cosh(x.detach() / softcap) ** 2
    p = torch.softmax(softcap * torch.tanh(x.detach() / softcap), -1)
    want = p * (probe.double() - (p * probe.double()).sum(-1, keepdim=True)) * slope
    jvp_want = p * (slope * probe - (p * slope * probe).sum(-1, keepdim=True))

    def call(s):
        return mha_ext.masked_softmax(s, softcap=softcap)

    def loss(s):
        return (call(s) * probe).sum()

    leaf = scores.clone().requires_grad_()
    got = {
        "autograd": torch.autograd.grad(loss(leaf), leaf)[0],
        "create_graph": torch.autograd.grad(loss(leaf), leaf, create_graph=True)[0].detach(),
        "func.grad": func.grad(loss)(scores),
        "func.vjp": func.vjp(call, scores)[1](probe)[0],
        "func.jvp": func.jvp(call, (scores,), (probe,))[1],
        "vmap": func.vmap(func.grad(loss))(scores[None])[0],
    }
    eps = torch.finfo(torch.float32).eps
    terms = p * slope * (probe.abs() + (p * probe.abs()).sum(-1, keepdim=True))
    jvp_terms = p * (slope * probe.abs() + (p * slope * probe.abs()).sum(-1, keepdim=True))
    for name, x in got.items():
        right, sizes = (jvp_want, jvp_terms) if name == "func.jvp" else (want, terms)
        allowed = eps * (scores.numel() + 2 * size / softcap) * sizes
        assert ((x.double() - right).abs() <= allowed).all(), f"{name}\n got {x}\nwant {right}"


@pytest.mark.parametrize("options", [{}, dict(softcap=1.5), dict(softcap=1.5, sinks=True)], ids=str)
@pytest.mark.parametrize("offset", [2**63 - 1, -(2**63)])
def test_causal_offset_at_the_end_of_64_bits(offset, options):
    """Everything or nothing is visible; the position i + offset must not wrap round, in no derivative of any order."""
    query, key, value, extra = Case(dtype=torch.float64, **options).build()
    offsets = torch.full((2,), offset)
    tangent = torch.randn_like(query)

    def call(query):
        return mha_ext.attention(query, key, value, is_causal=True, causal_offset=offsets, **extra)

    def all_or_nothing(query):
        results = mha_ext.attention(query, key, value, **extra)
        return results if offset > 0 else tuple(x * 0 for x in results)

    def derivatives(call):
        gradient = func.grad(loss_of(call))
        return (*call(query), *func.jvp(call, (query,), (tangent,))[1], *func.jvp(gradient, (query,), (tangent,)))

    assert_rounding_only(derivatives(call), derivatives(all_or_nothing), (query, key, value), f"offset {offset}")


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap_over_nothing_with_dropout(randomness):
    query = torch.randn(0, 2, 2, 5, 8)
    key, value = torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 3)
    output, weights = func.vmap(lambda q: mha_ext.attention(q, key, value, dropout=0.5), randomness=randomness)(query)
    assert output.shape == (0, 2, 2, 5, 3)
    assert weights.shape == (0, 2, 2, 5, 7)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("number", "as_tensor"), [(2**63 - 1, True), (-(2**63), True), (2**60, False), (-(2**60), False)]
)
def test_the_stand_in_sees_what_the_kernel_sees_far_away(number, as_tensor, side):
    """mha_ext.reference, which torch.func inside of torch.compile runs, must not wrap round either."""
    scores = torch.zeros(1, 1, 3, 4)
    offsets, offset = (torch.full((1, 1), number), 0) if as_tensor else (None, number)
    left, right = (1, 2**63 - 1) if side == "left" else (2**63 - 1, 1)
    visibility = (None, None, offsets, left, right, offset, 0.0, float("-inf"))
    kernel = torch.ops.mha_ext.masked_softmax(scores, None, None, *visibility)[0]
    assert torch.equal(mha_ext.reference.masked_softmax(scores, None, None, *visibility)[0], kernel)
    hides_all = (number > 0) == (side == "left")
    assert torch.equal(kernel, torch.full_like(scores, 0.0 if hides_all else 0.25))


@pytest.mark.parametrize("nesting", ["jacfwd_jacfwd", "jacfwd_hessian", "jvp_vmap_jvp"])
def test_forward_over_forward(nesting):
    """torch keeps the tangents of one forward level in a custom Function; the outer ones must not read as zero."""
    query, key = torch.randn(1, 1, 2, 3).double(), torch.randn(1, 1, 4, 3).double()

    def ours(q):
        k = key.reshape((q.dim() - 2) * (1,) + (4, 3))  # as many dimensions as the query, also under vmap
        return mha_ext.attention(q, k, k, is_causal=True, softcap=2.0)[0].pow(2).sum()

    def plain(q):
        scores = 2 * torch.tanh(q @ key.mT / 3**0.5 / 2)
        return (torch.where(torch.ones(2, 4).tril().bool(), scores, -torch.inf).softmax(-1) @ key).pow(2).sum()

    def derivative(f):
        if nesting == "jacfwd_jacfwd":
            return func.jacfwd(func.jacfwd(f))(query)
        if nesting == "jacfwd_hessian":
            return func.jacfwd(func.hessian(f))(query)
        inner = func.vmap(lambda q: func.jvp(f, (q,), (query[0],))[1])
        return func.jvp(lambda q: inner(q).sum(), (query,), (query,))[1]

    got = derivative(ours)
    assert got.abs().max() > 0
    assert_rounding_only(got, derivative(plain), (query, key), nesting)
