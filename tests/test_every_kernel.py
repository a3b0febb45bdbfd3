"""Every CUDA kernel runs, right: for each that a launcher can choose a small call, against the oracle."""

import dataclasses

import other_devices
import pytest
import torch
from cases import DTYPES, Case
from compare import Expected, check_attention, run
from tolerances import assert_rounding_only

import mha_ext

pytestmark = pytest.mark.skipif(not other_devices.NAMES, reason="MHA_EXT_TEST_ON names no device with CUDA kernels")

ON_TENSOR_CORES = (torch.bfloat16, torch.float16)
MASK_DTYPES = (torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)


def by_multiply_adds(dtype):
    """Few queries and more, few columns and more; and keys in parts."""
    d = 264 if dtype in ON_TENSOR_CORES else 40  # heads beyond 256 do not fit the tensor cores' tiles
    everything = Case(dtype=dtype, d=d, bias="heads", sinks=True, is_causal=True)
    for size in (dict(lq=5, dv=8), dict(lq=20, dv=8), dict(lq=20, dv=72)):
        check_attention(dataclasses.replace(everything, lk=21, **size))
    check_attention(Case(dtype=dtype, batch=(1,), heads=1, lq=1, lk=600, d=d, dv=8), need_weights=False)


def on_tensor_cores(dtype):
    for d, bias in ((32, "heads"), (64, "full"), (96, "per_query"), (128, "per_key"), (256, "one")):
        plain = Case(dtype=dtype, batch=(1,), lq=70, lk=70, d=d, is_causal=True)
        check_attention(plain, need_weights=False)
        check_attention(dataclasses.replace(plain, softcap=3.0, dropout=0.2, bias=bias), need_weights=False)
        check_attention(plain, need_weights=True)
        many_queries(dtype, d)


def many_queries(dtype, d):
    """Enough for blocks of 128, of which all but one entry's have nothing to see: that one is what it is by itself, in
    blocks of 64."""
    query, key, value = (torch.randn(64, 1, n, d).to(dtype) for n in (150, 200, 200))
    lengths = torch.tensor([0] * 63 + [190])
    mask = torch.rand(1, 1, 150, 200) < 0.9
    hidden = key.clone()
    hidden[..., 190:, :] = torch.nan
    for keys, options in (
        (key, {}),
        (hidden, {}),
        (key, dict(is_causal=True, causal_offset=30)),
        (key, dict(mask=mask)),
        (key * 2.0**13, dict(scale=4096.0)),
    ):
        output, _ = mha_ext.attention(query, keys, value, key_lengths=lengths, need_weights=False, **options)
        assert (output[:63] == 0).all()
        last = query[63:], keys[63:], value[63:]
        alone, _ = mha_ext.attention(*last, key_lengths=lengths[63:], need_weights=False, **options)
        assert_rounding_only(output[63:], alone, [key[63:, 0, :, 0]], f"D {d}, {list(options)}", dtype)


def by_steps(dtype):
    for layout in ("contiguous", "permuted"):
        case = Case(dtype=dtype, lq=20, lk=33, bias="per_key", sinks=True, layout=layout)
        query, key, value, options = case.build()
        right = Expected(case, {"query": query, "key": key, "value": value}, options)
        got = run(
            lambda *a, **o: mha_ext.attention(*a, dropout=lambda w: w, **o), right.tensors, right.options, right.grads
        )
        for n, name in enumerate(("output", "weights")):
            right.same(name, got[n], right.want[n], right.plain[n])
        for name, grad in got[2].items():
            right.same(name, grad, right.want[2][name], right.plain[2][name])


def sums_and_dropout(dtype):
    ones = torch.ones(64, 1000, dtype=dtype)
    assert torch.equal(torch.ops.mha_ext.sum_over(ones, [1]), torch.full((64, 1), 1000, dtype=dtype))
    assert torch.equal(torch.ops.mha_ext.sum_over(ones[:, :500], [0, 1]), torch.full((1, 1), 32000, dtype=dtype))
    assert set(torch.ops.mha_ext.dropout(ones[None, None], torch.tensor(3), 0.5).unique().tolist()) == {0.0, 2.0}


def masks():
    for dtype in MASK_DTYPES:
        mask = torch.arange(70).remainder(3).to(dtype)
        assert torch.equal(torch.ops.mha_ext.keep_mask(mask), mask != 0)


# Apart on a GPU, so that one's failure does not hide the others'; the interpreter counts which kernels all of them run.
@pytest.mark.parametrize("dtypes", [[x] for x in DTYPES] if other_devices.NAMES == ("cuda",) else [DTYPES], ids=str)
def test_every_kernel(isa, dtypes):
    for dtype in dtypes:
        by_multiply_adds(dtype)
        by_steps(dtype)
        sums_and_dropout(dtype)
        if dtype in ON_TENSOR_CORES:
            on_tensor_cores(dtype)
    masks()
    if isa.startswith("ptx"):
        from interpreted import load

        left = [name for name in load().ptxvm_not_launched().decode().split() if name.startswith("_ZN3mha")]
        assert not left, "\n".join(left)
