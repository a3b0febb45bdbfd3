"""Dropout: bits from Philox4x32-10 at (batch, head, query, key), whatever the call looks like around them."""

import oracle
import pytest
import torch
from cases import DTYPES, Case, lay_out
from compare import check_attention, seed_drawn_from
from tolerances import assert_same_bits
from torch import nn

import mha_ext

pytestmark = pytest.mark.usefixtures("isa")

SHAPE = (2, 3, 17, 41)  # batch, head, query, key
SEEDS = (0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF)


def dropped(weights, seed, p):
    return torch.ops.mha_ext.dropout(weights, torch.tensor(seed), p)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=("zeros", "ones", "pi"),
)
def test_oracle_gives_the_published_vectors(counter, key, words):
    """Random123's known-answer file; so what follows compares the product with the real Philox."""
    assert oracle.philox(counter, key) == words


@pytest.mark.parametrize("p", [0.1, 0.25, 0.5, 0.999, 1e-6])
@pytest.mark.parametrize("seed", SEEDS)
def test_bits(isa, seed, p):
    want = oracle.keep_mask(seed, p, SHAPE)
    assert torch.equal(dropped(torch.ones(SHAPE), seed, p) != 0, want), f"ISA {isa}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kept_weights_are_scaled_exactly(isa, dtype):
    """w / (1 - p) as nn.Dropout gives it: the factor in the accumulation dtype, one rounding at the end."""
    weights = torch.randn(SHAPE, dtype=torch.float64).to(dtype)
    p = 0.3
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    want = torch.where(oracle.keep_mask(7, p, SHAPE), weights.to(wide) * torch.tensor(1 / (1 - p), dtype=wide), 0).to(
        dtype
    )
    got = dropped(weights, 7, p)
    assert torch.equal(got, want), f"ISA {isa}: off by up to {(got.double() - want.double()).abs().max()}"


@pytest.mark.parametrize("place", [(0, 0, 2, 5), (1, 1, 16, 40)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_at_the_threshold_are_kept(isa, dtype, place):
    """With p made of one element's own bits; in the step, in the fused operator and in its backward."""
    shape = (2, 2, 17, 41)
    torch.manual_seed(6)
    seed = seed_drawn_from(torch.get_rng_state())
    p = oracle.dropout_fields(seed, shape)[place].item() / 65536
    keep = oracle.keep_mask(seed, p, shape)
    assert 0 < p < 0.9
    assert keep[place]
    assert torch.equal(dropped(torch.ones(shape, dtype=dtype), seed, p) != 0, keep), isa
    query, key = torch.zeros(2, 2, 17, 8, dtype=dtype), torch.zeros(2, 2, 41, 8, dtype=dtype)
    value = torch.eye(41, dtype=dtype).expand(2, 2, 41, 41).clone().requires_grad_()
    upstream = torch.zeros(2, 2, 17, 41, dtype=dtype)
    upstream[..., place[2], :] = 1
    for need_weights in (False, True):
        torch.manual_seed(6)
        output, _ = mha_ext.attention(query, key, value, dropout=p, need_weights=need_weights)
        assert torch.equal(output != 0, keep), isa
        (grad,) = torch.autograd.grad(output, value, upstream)
        assert torch.equal(grad[..., 0] != 0, keep[..., place[2], :]), isa


def test_float32_equals_nn_functional_dropout_on_kept_weights(isa):
    weights = torch.rand(SHAPE) + 0.5
    theirs, ours = nn.functional.dropout(weights, 0.3), dropped(weights, 3, 0.3)
    both = (theirs != 0) & (ours != 0)
    assert both.any()
    assert torch.equal(theirs[both], ours[both]), f"ISA {isa}"


@pytest.mark.parametrize("layout", ["blhd", "permuted", "strided"])
def test_bits_do_not_depend_on_strides(isa, layout):
    weights = torch.randn(SHAPE)
    assert_same_bits(dropped(lay_out(weights, layout), 5, 0.4), dropped(weights, 5, 0.4), f"ISA {isa}")


def test_bits_do_not_depend_on_sizes(isa):
    """A smaller call sees the corner of the larger one."""
    large = dropped(torch.ones(3, 4, 70, 150), 11, 0.5)
    for b, h, i, j in ((1, 1, 1, 1), (2, 3, 17, 41), (3, 4, 70, 149), (1, 4, 33, 8)):
        assert_same_bits(
            dropped(torch.ones(b, h, i, j), 11, 0.5), large[:b, :h, :i, :j].contiguous(), f"ISA {isa} {b, h, i, j}"
        )


def test_leading_dimensions_count_as_one_batch(isa):
    assert_same_bits(
        dropped(torch.ones(2, 3, 2, 5, 9), 1, 0.5).flatten(0, 1), dropped(torch.ones(6, 2, 5, 9), 1, 0.5), isa
    )


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_do_not_depend_on_threads(threads):
    torch.set_num_threads(threads)
    assert torch.equal(dropped(torch.ones(4, 4, 64, 64), 2, 0.3) != 0, oracle.keep_mask(2, 0.3, (4, 4, 64, 64)))


def test_heads_batches_and_seeds_differ():
    """No two (batch, head, query) rows share their bits, nor do two seeds."""
    rows = torch.cat([dropped(torch.ones(3, 4, 5, 256), seed, 0.5).reshape(60, 256) for seed in (1, 2)])
    assert len({tuple(row.tolist()) for row in rows != 0}) == 120


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_drop_rate(p):
    """The rate is round(p * 65536) / 65536; over n draws it may stray by the binomial's five standard deviations."""
    n = 1 << 20
    rate = (dropped(torch.ones(1, 1, 1024, 1024), 123, p) == 0).double().mean().item()
    assert abs(rate - p) <= 2**-16 + 5 * (p * (1 - p) / n) ** 0.5


def test_p_zero_draws_nothing():
    query, key, value, _ = Case().build()
    before = torch.get_rng_state()
    with_zero = mha_ext.attention(query, key, value, dropout=0.0)
    assert torch.equal(torch.get_rng_state(), before)
    without = mha_ext.attention(query, key, value)
    assert torch.equal(torch.get_rng_state(), before)
    assert_same_bits(with_zero[1], without[1])
    mha_ext.attention(query, key, value, dropout=0.5)
    assert not torch.equal(torch.get_rng_state(), before)


def test_p_one_gives_zeros(isa):
    case = Case(dropout=1.0, mask="full")
    output, weights, grads = check_attention(case)
    for x in (output, weights, *grads.values()):
        assert (x == 0).all(), isa


def test_manual_seed_governs_the_bits():
    query, key, value, _ = Case(lq=33, lk=33).build()
    torch.manual_seed(4)
    state = torch.get_rng_state()
    first, second = (mha_ext.attention(query, key, value, dropout=0.4)[1] for _ in range(2))
    torch.manual_seed(4)
    again = mha_ext.attention(query, key, value, dropout=0.4)[1]
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert torch.equal(first != 0, oracle.keep_mask(seed_drawn_from(state), 0.4, (2, 2, 33, 33)))


def test_generator_governs_the_bits():
    """A generator passed in is the one that is drawn from, and the default one stays untouched."""
    query, key, value, _ = Case(lq=33, lk=33).build()
    default, generator = torch.get_rng_state(), torch.Generator().manual_seed(8)
    state = generator.get_state()
    weights = mha_ext.attention(query, key, value, dropout=0.4, generator=generator)[1]
    assert torch.equal(torch.get_rng_state(), default)
    assert torch.equal(weights != 0, oracle.keep_mask(seed_drawn_from(state), 0.4, (2, 2, 33, 33)))
    assert not torch.equal(generator.get_state(), state)


def test_the_weights_returned_are_those_used():
    query, key, value, _ = Case(dtype=torch.float64, lq=9, lk=9).build()
    output, weights = mha_ext.attention(query, key, value, dropout=0.5)
    assert (weights == 0).any()
    assert torch.equal(output, mha_ext.weighted_sum(weights, value))


def test_an_nn_dropout_is_active_in_training_only():
    query, key, value, _ = Case(lq=17, lk=17).build()
    layer = nn.Dropout(0.5)
    torch.manual_seed(1)
    by_layer = mha_ext.attention(query, key, value, dropout=layer)[1]
    torch.manual_seed(1)
    assert torch.equal(by_layer, mha_ext.attention(query, key, value, dropout=0.5)[1])
    layer.eval()
    state = torch.get_rng_state()
    assert torch.equal(mha_ext.attention(query, key, value, dropout=layer)[1], mha_ext.attention(query, key, value)[1])
    assert torch.equal(torch.get_rng_state(), state)


def test_any_other_callable_is_applied_to_the_weights():
    query, key, value, _ = Case(dtype=torch.float64).build()
    calls = []

    def halve(weights):
        calls.append(weights.shape)
        return weights * 0.5

    output, weights = mha_ext.attention(query, key, value, dropout=halve)
    assert calls == [(2, 2, 5, 7)]
    assert torch.equal(weights, mha_ext.masked_softmax(mha_ext.attention_scores(query, key)) * 0.5)
    assert torch.equal(output, mha_ext.weighted_sum(weights, value))


def test_the_backward_uses_the_forward_bits(isa):
    """d output / d value is the transposed dropped weights."""
    case = Case(dtype=torch.float64, batch=(1,), heads=1, lq=6, lk=9, dv=1)
    query, key, value, _ = case.build()
    value.requires_grad_()
    output, weights = mha_ext.attention(query, key, value, dropout=0.5)
    (grad,) = torch.autograd.grad(output.sum(), value)
    assert torch.equal(grad[..., 0] == 0, (weights == 0).all(-2)), isa
    error = (grad[..., 0] - weights.sum(-2)).abs()
    assert (error <= torch.finfo(torch.float64).eps * case.lq * weights.sum(-2)).all(), isa
