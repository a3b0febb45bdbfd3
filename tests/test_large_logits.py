"""Logits as large as numbers get. A backward from the log-sum alone goes wrong here; row max and row sum kept apart
stay right. On CUDA rows from 2^24 on (2^53 in float64) are computed another way than those below."""

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
    """Two numbers whose product is about `size`, or as near as the dtype allows: a power of two and one with three
    bits, so that products are exact, but not their multiples by log2 e."""
    power = int(math.log2(size)) - 2
    factors = 7 * 2.0 ** (power // 2), 2.0 ** (power - power // 2)
    return [min(x, 7 / 8 * END_OF_FLOAT16) if dtype == torch.float16 else x for x in factors]


def far_on_cuda(size, dtype):
    return abs(size) * math.log2(math.e) >= (2.0**53 if dtype == torch.float64 else 2.0**24)


def signs(*shape):
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(sum(shape))).float()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_one_key_wins(size, dtype):
    """Scores up to `size`, half of it apart: each row's winner is beyond doubt. From 1e4 on the weights are exactly
    one-hot; at 1e2 the others still hold exp(-56), and everything follows the tolerance rule."""
    lq, lk = 6, 9
    winner = torch.tensor([0, 8, 3, 3, 5, 1])
    one_hot = torch.nn.functional.one_hot(winner, lk).to(dtype)
    left, right = in_two_factors(size, dtype)
    key = torch.eye(lk, dtype=dtype)[None, None] * right
    query = (torch.full((lq, lk), 0.5).to(dtype) + one_hot * 0.5)[None, None] * left
    value = torch.randn(1, 1, lk, 5).to(dtype)
    if size <= (1e4 if dtype == torch.float16 else 1e8):  # where plain PyTorch is finite
        case = Case(dtype=dtype, batch=(1,), heads=1, lq=lq, lk=lk, d=lk, dv=5, scale=1.0)
        Expected(case, {"query": query, "key": key, "value": value}, {"scale": 1.0}).check()
    if size < 1e4:
        return
    leaves = [x.requires_grad_() for x in (query, key, value)]
    output, weights = mha_ext.attention(*leaves, scale=1.0)
    grads = torch.autograd.grad(output.sum(), leaves)
    assert torch.equal(weights[0, 0], one_hot)  # exp(-size / 2) is zero in every dtype
    assert torch.equal(output[0, 0], value[0, 0, winner])
    # dP - sum P dP of the winner: two sums of the same terms, each of which may be off by one unit.
    terms = value.double().abs().sum(-1).max() + 1
    for grad, factor in zip(grads[:2], (right, left * lq), strict=True):
        assert (grad.double().abs() <= torch.finfo(dtype).eps * (5 + lk) * terms * factor).all()
    assert torch.equal(grads[2][0, 0], one_hot.sum(0)[:, None].expand(lk, 5))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [4e3, 5e4, 5e8, -5e8, 3e9, 1e12, -1e12, 2e37])
def test_ties(size, dtype, need_weights):
    """All scores equal, 8 times about `size`: the weights are uniform and the gradients those of the uniform row. On
    CUDA the weights of rows that are not far are not 1 before they are divided by their sum: a last bit may differ."""
    left, right = in_two_factors(abs(size), dtype)
    query = torch.full((1, 1, 4, 8), math.copysign(left, size), dtype=dtype, requires_grad=True)
    key = torch.full((1, 1, 16, 8), right, dtype=dtype, requires_grad=True)
    value = torch.randn(1, 1, 16, 8).to(dtype).requires_grad_()
    output, weights = mha_ext.attention(query, key, value, scale=1.0, need_weights=need_weights)
    grads = torch.autograd.grad(output.sum(), (query, key, value))
    rounded = other_devices.NAMES and not far_on_cuda(8 * left * right, dtype)
    last_bit = dict(rtol=2 * torch.finfo(dtype).eps if rounded else 0, atol=0)
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
    each weight may be off by a few units of the dtype, and by what rounding an exponent of up to 126 does, 2^-18 in
    float32; below the normal numbers nothing is promised. Left out are gradients that float16 cannot hold."""
    right = Expected(case, tensors, options, through_weights=need_weights)
    info, acc = torch.finfo(case.dtype), torch.finfo(accumulation_dtype(case.dtype))
    query, key, value = (tensors[n].double() for n in ("query", "key", "value"))
    group, kept = case.heads // (case.kv_heads or case.heads), 1 / (1 - case.dropout)
    key, value = (x.repeat_interleave(group, 1).abs() for x in (key, value))
    p = oracle.attention(query, tensors["key"].double().repeat_interleave(group, 1), value, **options)[1] * kept
    upstream, through = (None if g is None else g.double().abs() for g in right.grads)
    dp = upstream @ value.mT * kept + (0 if through is None else through * kept)
    dp = dp + (p * dp).sum(-1, keepdim=True)

    def sizes(p):
        over_heads = [x.unflatten(1, (-1, group)).sum(2) for x in ((p * dp).mT @ query.abs(), p.mT @ upstream)]
        grads = options["scale"] * ((p * dp) @ key), options["scale"] * over_heads[0], over_heads[1]
        return dict(zip(("output", "weights", "query", "key", "value"), (p @ value, p, *grads), strict=True))

    size, underflow = sizes(p), sizes(torch.full_like(p, info.smallest_normal * info.eps + acc.smallest_normal))
    output, weights, grads = right.product(need_weights)
    results = [("output", output, right.want[0])] + [(n, x, right.want[2][n]) for n, x in grads.items()]
    if need_weights:
        results.append(("weights", weights, right.want[1]))
    for name, got, want in results:
        allowed = (4 * info.eps + 256 * acc.eps) * size[name] + underflow[name] + info.smallest_normal
        can_be_held = want.abs() + size[name] < info.max / 2
        excess = torch.where(can_be_held, (got.double() - want).abs() - allowed, 0)
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


def check_far_and_near(case, options, need_weights):
    """One row in three has scores up to about 1e12 (1e10 in float16), one down to minus that, one of no size."""
    left, right = in_two_factors(1e12, case.dtype)
    rows = torch.tensor([1 / right, left, -left]).repeat(24)[:70, None]
    kv_heads = case.kv_heads or case.heads
    query, key = signs(2, case.heads, 70, case.d) * rows, signs(2, kv_heads, 200, case.d) * right
    if kv_heads > 1:  # so that rows of this head have one sign
        query[:, 1], key[:, 1] = rows, key[:, 1].abs()
    value = case.randn("value", (2, kv_heads, 200, case.dv))
    tensors = {"query": query.to(case.dtype), "key": key.to(case.dtype), "value": value}
    check_with_exact_scores(case, tensors, {"scale": 1.0, **options}, need_weights)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", BESIDE)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_rows_far_and_near(how, dtype, need_weights, dropout):
    case = Case(dtype=dtype, lq=70, lk=200, d=16, dv=24, scale=1.0, dropout=dropout)
    check_far_and_near(case, BESIDE[how], need_weights)


@pytest.mark.parametrize("d", [64, 96, 128, 200])
def test_rows_far_and_near_of_larger_heads(d):
    case = Case(dtype=torch.bfloat16, lq=70, lk=200, d=d, dv=d, scale=1.0, kv_heads=1)
    check_far_and_near(case, {"enable_gqa": True}, need_weights=False)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("power", [15, 22, 38, 51])
def test_neighbours(power, dtype, need_weights):
    """Scores of about 3 * 2^power, and negative ones, that differ by the smallest steps that float32 (or float64) has
    there: the weights are those of the differences."""
    step = 2.0 ** max(0, power + 1 - (52 if dtype == torch.float64 else 23))
    if dtype == torch.float16 and power > 22:
        pytest.skip("float16 does not go that far")
    query, key = torch.zeros(1, 2, 66, 16), torch.zeros(1, 2, 150, 16)
    query[..., 0], query[..., 1] = 3 * 2.0 ** (power // 2), step
    query[..., 1::2, 0] *= -1
    key[..., 0], key[..., 1] = 2.0 ** (power - power // 2), torch.arange(150.0).mul(7).remainder(16)
    case = Case(dtype=dtype, batch=(1,), lq=66, lk=150, d=16, dv=16, scale=1 / step)
    tensors = {"query": query.to(dtype), "key": key.to(dtype), "value": case.randn("value", (1, 2, 150, 16))}
    check_with_exact_scores(case, tensors, {"scale": 1 / step}, need_weights)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lq", [1, 66])
@pytest.mark.parametrize("order", ["up", "down"])
def test_rows_that_become_far(order, lq, dtype, need_weights):
    """Keys whose scores pass 2^24 / log2 e one by one: the way of computing changes on the way, or from part to part of
    the keys. Rows of odd number have the negative scores, which come back."""
    threshold = int(2**24 / math.log2(math.e))
    steps = threshold - 177 * 2**16 + torch.arange(-400, 400) // 2
    query, key = torch.zeros(1, 2, lq, 16), torch.zeros(1, 2, 800, 16)
    query[..., :3] = torch.tensor([177.0 * 2**8, 2**7, 1])
    query[:, 1] *= -1
    query[..., 1::2, :] *= -1
    key[..., :3] = torch.stack([torch.full((800,), 2.0**8), steps // 128, steps % 128], -1)
    if order == "down":
        key = key.flip(-2)
    case = Case(dtype=dtype, batch=(1,), lq=lq, lk=800, d=16, dv=8, scale=1.0)
    tensors = {"query": query.to(dtype), "key": key.to(dtype), "value": case.randn("value", (1, 2, 800, 8))}
    check_with_exact_scores(case, tensors, {"scale": 1.0}, need_weights)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_keys_in_parts(sign, dtype):
    """One query with many keys: the last ones have weight, or a few before them."""
    left, right = in_two_factors(1e12, dtype)
    query, key = torch.full((1, 1, 1, 64), sign * left), signs(1, 1, 900, 64).abs()
    key[..., 850:, :] = right
    case = Case(dtype=dtype, batch=(1,), heads=1, lq=1, lk=900, d=64, dv=8, scale=1.0)
    tensors = {"query": query.to(dtype), "key": key.to(dtype), "value": case.randn("value", (1, 1, 900, 8))}
    check_with_exact_scores(case, tensors, {"scale": 1.0}, need_weights=False)


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
