"""Logits as large as numbers get. A backward from the log-sum alone goes wrong here; row max and row sum kept apart
stay right. On CUDA rows beyond 2^16 are computed another way than those below, so they stand beside each other here."""

import math

import oracle
import other_devices
import pytest
import torch
from cases import DTYPES, Case
from compare import Expected
from tolerances import accumulation_dtype

import mha_ext

pytestmark = pytest.mark.usefixtures("isa")
SIZES = (1e2, 1e4, 1e6, 1e8, 1e12, 1e30)
END_OF_FLOAT16 = 2.0**15  # its largest power of two


def in_two_factors(size, dtype):
    """Powers of two whose product is about `size`, or as near as the dtype allows."""
    power = int(math.log2(size))
    factors = 2.0 ** (power // 2), 2.0 ** (power - power // 2)
    return [min(x, END_OF_FLOAT16) if dtype == torch.float16 else x for x in factors]


def signs(*shape):
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(sum(shape))).float()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_one_key_wins(size, dtype):
    """Scores up to `size`, powers of two apart: each row's winner is beyond doubt. From 1e4 on the weights are exactly
    one-hot; at 1e2 the others still hold exp(-32), and everything follows the tolerance rule."""
    lq, lk = 6, 9
    winner = torch.tensor([0, 8, 3, 3, 5, 1])
    one_hot = torch.nn.functional.one_hot(winner, lk).to(dtype)
    left, right = in_two_factors(size, dtype)
    key = torch.eye(lk, dtype=dtype)[None, None] * right
    query = (torch.full((lq, lk), 0.5).to(dtype) + one_hot * 0.5)[None, None] * left
    value = torch.randn(1, 1, lk, 5).to(dtype)
    if size < 1e4:
        case = Case(dtype=dtype, batch=(1,), heads=1, lq=lq, lk=lk, d=lk, dv=5, scale=1.0)
        Expected(case, {"query": query, "key": key, "value": value}, {"scale": 1.0}).check()
        return
    leaves = [x.requires_grad_() for x in (query, key, value)]
    output, weights = mha_ext.attention(*leaves, scale=1.0)
    grads = torch.autograd.grad(output.sum(), leaves)
    assert torch.equal(weights[0, 0], one_hot)  # exp(-size / 2) is zero in every dtype
    assert torch.equal(output[0, 0], value[0, 0, winner])
    # dP - sum P dP of the winner: two sums of the same terms, each of which may be off by one unit.
    terms = right * (value.double().abs().sum(-1).max() + 1)
    assert (grads[0].double().abs() <= torch.finfo(dtype).eps * (5 + lk) * terms).all()
    assert torch.equal(grads[2][0, 0], one_hot.sum(0)[:, None].expand(lk, 5))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [4e3, 5e4, 5e8, -5e8, 3e9, 1e12, -1e12, 2e37])
def test_ties(size, dtype, need_weights):
    """All scores equal and huge: the weights are uniform and the gradients those of the uniform row. On a GPU the
    weights of rows that are not far need not be 1 before they are divided by their sum: a last bit may differ."""
    left, right = in_two_factors(abs(size), dtype)
    query = torch.full((1, 1, 4, 8), math.copysign(left, size), dtype=dtype, requires_grad=True)
    key = torch.full((1, 1, 16, 8), right, dtype=dtype, requires_grad=True)
    value = torch.randn(1, 1, 16, 8).to(dtype).requires_grad_()
    output, weights = mha_ext.attention(query, key, value, scale=1.0, need_weights=need_weights)
    grads = torch.autograd.grad(output.sum(), (query, key, value))
    rounded = "cuda" in other_devices.NAMES and abs(size) < 1e4
    last_bit = dict(rtol=torch.finfo(dtype).eps if rounded else 0, atol=0)
    if need_weights:
        torch.testing.assert_close(weights, torch.full((1, 1, 4, 16), 1 / 16, dtype=dtype), **last_bit)
    torch.testing.assert_close(grads[2], torch.full((1, 1, 16, 8), 4 / 16, dtype=dtype), **last_bit)
    assert all(torch.isfinite(x).all() for x in grads)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("options", [{}, dict(is_causal=True), dict(sinks=True), dict(bias=True)], ids=str)
def test_the_fused_gradient(size, options):
    """|score| about `size` in float32, and every score exact: the relative error of dV stays under 1e-3, and dQ and dK
    stay finite. Row maxima are shared by several keys, which is where a log-sum loses them."""
    left, right = in_two_factors(size / 8, torch.float32)
    tensors = {
        "query": signs(1, 2, 96, 16) * left,
        "key": signs(1, 2, 200, 16) * right,
        "value": torch.randn(1, 2, 200, 24),
    }
    options = dict(options)
    if options.get("sinks"):
        options["sinks"] = torch.tensor([size, 0.0])
    if options.get("bias"):
        options["bias"] = torch.zeros(1, 200)
    scores = tensors["query"] @ tensors["key"].mT
    assert size / 8 < scores.abs().max() <= size * 4
    leaves = [x.requires_grad_() for x in tensors.values()]
    upstream = torch.randn(1, 2, 96, 24)
    grads = torch.autograd.grad(
        mha_ext.attention(*leaves, **options, scale=1.0, need_weights=False)[0], leaves, upstream
    )
    exact = [x.detach().double().requires_grad_() for x in leaves]
    wide = {n: x.double() if torch.is_tensor(x) else x for n, x in options.items()}
    want = torch.autograd.grad(oracle.attention(*exact, **wide, scale=1.0)[0], exact, upstream.double())
    assert ((grads[2] - want[2]).norm() / want[2].norm()) < 1e-3
    assert all(torch.isfinite(g).all() for g in grads)


def check_with_exact_scores(case, tensors, options, need_weights):
    """Against the oracle. Scores are exact, so that an error of a logit is no excuse here as it is in tolerances.py:
    each weight may be off by what exp() of differences of logits is, and by two units of the dtype. Of float16 only
    those gradients are looked at that it can hold."""
    right = Expected(case, tensors, {**options, "scale": 1.0}, through_weights=need_weights)
    acc = torch.finfo(accumulation_dtype(case.dtype))
    unit = 4 * torch.finfo(case.dtype).eps + 256 * acc.eps
    query, key, value = (tensors[n].double() for n in ("query", "key", "value"))
    kept = 1 / (1 - case.dropout)
    p = oracle.attention(query, key, value, **options, scale=1.0)[1] * kept
    upstream, through = (None if g is None else g.double().abs() for g in right.grads)
    dp = upstream @ value.abs().mT * kept + (0 if through is None else through * kept)
    ds = p * (dp + (p * dp).sum(-1, keepdim=True))
    sizes = {"query": ds @ key.abs(), "key": ds.mT @ query.abs(), "value": p.mT @ upstream}
    output, weights, grads = right.product(need_weights)
    results = [("output", output, right.want[0], p @ value.abs())]
    if need_weights:
        results.append(("weights", weights, right.want[1], p))
    results += [(n, grads[n], right.want[2][n], sizes[n]) for n in sizes]
    smallest = torch.finfo(case.dtype).smallest_normal + acc.smallest_normal * (1 + query.abs().max() + key.abs().max())
    for name, got, want, size in results:
        can_be_held = want.abs() + size < torch.finfo(case.dtype).max / 2
        excess = torch.where(can_be_held, (got.double() - want).abs() - unit * size - smallest, 0)
        wrong = ~(excess <= 0)
        assert not wrong.any(), (
            f"{name}, {case}, {list(options)}, ISA {mha_ext.isa()}: {int(wrong.sum())} of {want.numel()} are off\n"
            f"got  {got[wrong][:8]}\nwant {want[wrong][:8]}"
        )


BESIDE = {
    "plain": {},
    "causal": dict(is_causal=True, causal_offset=60),
    "mask": dict(mask=(torch.arange(70)[:, None] + torch.arange(200)) % 5 != 0),
    "key_lengths": dict(key_lengths=torch.tensor([3, 170])),
    "empty_rows": dict(mask=(torch.arange(70) % 4 != 0)[:, None].expand(70, 200)),
}


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", BESIDE)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_rows_far_and_near(how, dtype, need_weights, dropout):
    """One row in three has scores up to about 1e12, one down to about -1e12, one of no size."""
    left, right = in_two_factors(1e12, dtype)
    rows = torch.tensor([1 / right, left, -left]).repeat(24)[:70, None]
    query, key = signs(2, 2, 70, 16) * rows, signs(2, 2, 200, 16) * right
    key[:, 1] = key[:, 1].abs()  # so that rows of this head have one sign
    query[:, 1] = rows
    case = Case(dtype=dtype, lq=70, lk=200, d=16, dv=24, scale=1.0, dropout=dropout)
    tensors = {"query": query.to(dtype), "key": key.to(dtype), "value": case.randn("value", (2, 2, 200, 24))}
    check_with_exact_scores(case, tensors, BESIDE[how], need_weights)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_keys_in_parts(sign, dtype):
    """One query with many keys: the last ones have weight, or all but those."""
    left, right = in_two_factors(1e12, dtype)
    query, key = torch.full((1, 1, 1, 64), sign * left), signs(1, 1, 900, 64).abs()
    key[..., 850:, :] = right
    case = Case(dtype=dtype, batch=(1,), heads=1, lq=1, lk=900, d=64, dv=8, scale=1.0)
    tensors = {"query": query.to(dtype), "key": key.to(dtype), "value": case.randn("value", (1, 1, 900, 8))}
    check_with_exact_scores(case, tensors, {}, need_weights=False)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_beyond_the_range_of_float16(dtype, need_weights):
    """Scores of 102400 are never stored in the inputs' dtype, so float16's end at 65504 does not matter."""
    query, key = torch.full((1, 1, 3, 64), 40.0).to(dtype), torch.full((1, 1, 5, 64), 40.0).to(dtype)
    value = torch.randn(1, 1, 5, 4).to(dtype)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    output, weights = mha_ext.attention(*leaves, scale=1.0, need_weights=need_weights)
    grads = torch.autograd.grad(output.sum(), leaves)
    eps = torch.finfo(dtype).eps
    mean = value.detach().double().mean(-2, keepdim=True)
    assert ((output - mean).abs() <= 2 * eps * value.detach().double().abs().sum(-2, keepdim=True)).all()
    assert ((grads[2] - 3 / 5).abs() <= 4 * eps).all()
    assert all(torch.isfinite(g).all() for g in grads)
    if need_weights:
        assert ((weights - 0.2).abs() <= eps).all()
