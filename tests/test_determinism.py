"""Same bits on every run and for 1, 2 and 3 threads, forward and backward, with everything switched on."""

import dataclasses

import pytest
import torch
from cases import DTYPES, Case
from tolerances import assert_same_bits

import mha_ext

pytestmark = pytest.mark.usefixtures("isa")

# Enough rows and keys that work is split: 3 batch entries, 4 heads, several tiles each way.
CASES = {
    "plain": Case(batch=(3,), heads=4, lq=70, lk=90, d=40),
    "all": Case(
        batch=(3,),
        heads=4,
        kv_heads=2,
        lq=70,
        lk=90,
        d=24,
        dv=40,
        mask="full",
        bias="per_key",
        sinks=True,
        softcap=2.0,
        key_lengths=True,
        is_causal=True,
        causal_offset="lower_right",
        layout="blhd",
    ),
    "one_query": Case(batch=(1,), heads=2, lq=1, lk=2000, d=64),
    "one_bias": Case(batch=(2,), heads=2, lq=100, lk=60, bias="one"),
    "shared_bias": Case(batch=(3,), heads=4, lq=600, lk=300, bias="heads"),  # several waves
}


def results(case, dtype, threads):
    torch.set_num_threads(threads)
    torch.manual_seed(3)
    case = dataclasses.replace(case, dtype=dtype)
    query, key, value, options = case.build()
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    extra = {n: options.pop(n).requires_grad_() for n in ("bias", "sinks") if n in options}
    output, weights = mha_ext.attention(*leaves, **options, **extra, dropout=0.2)
    upstream = [case.randn("go", output.shape), case.randn("gw", weights.shape)]
    grads = torch.autograd.grad([output, weights], [*leaves, *extra.values()], upstream)
    names = ["output", "weights", "d query", "d key", "d value", *(f"d {n}" for n in extra)]
    return dict(zip(names, (output, weights, *grads), strict=True))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((n, torch.float32) for n in CASES), *(("all", d) for d in DTYPES if d != torch.float32)],
    ids=str,
)
def test_threads(name, dtype):
    one = results(CASES[name], dtype, 1)
    for threads in (2, 3):
        for key, x in results(CASES[name], dtype, threads).items():
            assert_same_bits(x, one[key], f"{name}, {key}, {threads} threads against 1")


@pytest.mark.parametrize("name", ["all", "one_query"])
def test_runs(name):
    first = results(CASES[name], torch.float32, 2)
    for _ in range(2):
        for key, x in results(CASES[name], torch.float32, 2).items():
            assert_same_bits(x, first[key], f"{name}, {key}, a later run")


def test_a_batch_entry_does_not_depend_on_its_neighbours():
    """The first entry alone gives the bits it gives among three: no tile spans two entries."""
    case = CASES["plain"]
    query, key, value, _ = case.build()
    together = mha_ext.attention(query, key, value)
    alone = mha_ext.attention(query[:1], key[:1], value[:1])
    for a, b in zip(alone, together, strict=True):
        assert_same_bits(a, b[:1].contiguous())


@pytest.mark.parametrize("shape", [(), (1,), (90,), (70, 1), (4, 1, 1), (3, 1, 1, 90), (1, 4, 70, 1)], ids=str)
def test_bias_gradient_of_any_shape(shape):
    """Summed over the broadcast dimensions in a fixed order, for any number of threads."""
    case = CASES["plain"]
    query, key, value, _ = case.build()
    grads = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        bias = torch.zeros(shape, requires_grad=True)
        output, weights = mha_ext.attention(query, key, value, bias=bias)
        loss = output.square().sum() + weights.square().sum()
        grads.append(torch.autograd.grad(loss, bias)[0])
    assert grads[0].shape == shape
    for grad in grads[1:]:
        assert_same_bits(grad, grads[0], str(shape))
