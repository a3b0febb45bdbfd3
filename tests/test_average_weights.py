"""The mean of the weights over the heads, made in the fused kernel's pass: its values, derivatives, and its cost."""

import differentiable
import other_devices
import pytest
import torch
from cases import DTYPES, Case
from compare import expected
from levels import each_level, highest_level_only
from test_fused import Calls
from test_fused_runtime import in_new_process, linux
from tolerances import assert_close, assert_rounding_only, assert_same_bits
from torch.autograd import gradcheck, gradgradcheck

import mha_ext
from mha_ext import composition, ops
from mha_ext.arguments import SoftmaxOptions
from mha_ext.reference import UNBOUNDED

pytestmark = [
    pytest.mark.usefixtures("isa"),
    pytest.mark.skipif(bool(other_devices.NAMES), reason="the mean over the heads has kernels on CPU only"),
]
MIB = 2**20


def attention(query, key, value, mask=None, dropout=None, *, generator=None, scale=None, enable_gqa=False, **options):
    """mha_ext.attention with the mean of the weights."""
    return composition.attention(
        query, key, value, SoftmaxOptions(mask, **options), dropout, scale, enable_gqa, True, generator,
        average_weights=True,
    )  # fmt: skip


def averaging(function, monkeypatch):
    """The call of a differentiable.Function, with the mean instead of the weights."""

    def call(*inputs):
        with monkeypatch.context() as patched:
            patched.setattr(mha_ext, "attention", attention)
            return function.call(*inputs)

    return call


FUNCTIONS = [f for f in differentiable.ATTENTION if f.name != "two_dimensional"]
every_function = pytest.mark.parametrize("function", FUNCTIONS, ids=str)


@every_function
def test_equals_the_mean(function, monkeypatch):
    """Output, mean and the gradients through both, against the weights of all heads averaged by torch."""
    got = averaging(function, monkeypatch)(*(leaves := function.leaves()))
    output, weights = function.call(*(others := function.leaves()))
    want = output, weights.mean(-3)
    assert_rounding_only(got, want, function.inputs, str(function))
    grads = [torch.randn_like(x) for x in want]
    mine, theirs = torch.autograd.grad(got, leaves, grads), torch.autograd.grad(want, others, grads)
    assert_rounding_only(mine, theirs, function.inputs, str(function))


@highest_level_only
@every_function
def test_gradcheck(function, monkeypatch):
    call = averaging(function, monkeypatch)
    assert gradcheck(call, function.leaves(), check_undefined_grad=True, check_batched_grad=True, fast_mode=True)
    assert gradgradcheck(call, function.leaves(), fast_mode=True)


@highest_level_only
@pytest.mark.parametrize("function", [f for f in FUNCTIONS if f.name in ("plain", "everything")], ids=str)
def test_forward_mode(function, monkeypatch):
    assert gradcheck(averaging(function, monkeypatch), function.leaves(), check_forward_ad=True, fast_mode=True)


LONG = dict(batch=(3,), heads=3, lq=130, lk=301, d=16)
SIZES = (
    {},
    dict(lq=1, lk=1, heads=1),
    dict(lq=0),
    dict(lk=0),
    dict(batch=(0,)),
    dict(batch=(2, 3), heads=4, kv_heads=2, lq=65, lk=33, d=5, dv=3),
    dict(LONG, is_causal=True, dropout=0.2),
    dict(LONG, mask="full", bias="full", key_lengths=True, window=(40, 3), layout="blhd"),
)


@pytest.mark.parametrize("fields", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_tolerance_rule(dtype, fields):
    case = Case(dtype=dtype, **fields)
    right = expected(case)
    query, key, value, options = case.build()
    torch.manual_seed(case.seed)
    output, mean = attention(query, key, value, dropout=case.dropout, **options)
    right.same("output", output, right.want[0], right.plain[0])
    magnitudes = right.magnitudes["weights"]
    magnitudes = type(magnitudes)(magnitudes.stored.mean(-3), magnitudes.summed.mean(-3))
    assert_close(mean, right.want[1].mean(-3), right.plain[1].mean(-3), magnitudes, dtype=dtype, case=case, name="mean")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_in_low_precision(dtype):
    """A gradient through the mean, over several blocks of keys, is that through the weights kept, up to rounding."""
    case = Case(dtype=dtype, **LONG, is_causal=True, dropout=0.2)
    grads = []
    for call in (attention, mha_ext.attention):
        leaves = [x.requires_grad_() for x in case.build()[:3]]
        torch.manual_seed(1)
        weights = call(*leaves, dropout=0.2, is_causal=True)[1]
        mean = weights if weights.dim() == 3 else weights.mean(-3)
        grads.append(torch.autograd.grad(mean, leaves[:2], torch.ones_like(mean) * mean.detach()))
    for mine, theirs in zip(*grads, strict=True):
        error = (mine.double() - theirs.double()).norm() / theirs.double().norm()
        assert error < 30 * torch.finfo(dtype).eps, error


def test_hidden_nan_stays_hidden():
    """A value of NaN spoils a panel, which then runs a second time: its weights must count once."""
    query, key, value, _ = Case(dtype=torch.float64, **LONG).build()
    hidden = value.clone()
    hidden[..., 200:, :] = torch.nan
    lengths = torch.full((3,), 200)
    results = (attention(query, key, x, key_lengths=lengths) for x in (hidden, value))
    for got, want in zip(*results, strict=True):
        assert_same_bits(got, want)


def test_rows_that_see_nothing():
    query, key, value, _ = Case(dtype=torch.float64).build()
    leaves = [x.requires_grad_() for x in (query, key, value)]
    output, mean = attention(*leaves, torch.tensor([True, False])[:, None, None, None])
    assert (output[1] == 0).all()
    assert (mean[1] == 0).all()
    grads = torch.autograd.grad(output.sum() + mean.square().sum(), leaves)
    assert all((g[1] == 0).all() and torch.isfinite(g).all() for g in grads)


@highest_level_only
@pytest.mark.parametrize("threads", [2, 5])
def test_the_same_bits_for_any_number_of_threads(threads):
    case = Case(**LONG, bias="heads")

    def results():
        query, key, value, options = case.build()
        leaves = [x.requires_grad_() for x in (query, key, value)]
        output, mean = attention(*leaves, **options)
        return output, mean, *torch.autograd.grad(output.sin().sum() + mean.square().sum(), leaves)

    want = results()
    torch.set_num_threads(threads)
    for got, right in zip(results(), want, strict=True):
        assert_same_bits(got, right)


@highest_level_only
def test_it_is_one_operator():
    query, key, value, _ = Case().build()
    leaves = [x.requires_grad_() for x in (query, key, value)]
    with Calls() as forward:
        output, mean = attention(*leaves)
    with Calls() as backward:
        torch.autograd.grad(output.sum() + mean.square().sum(), leaves)
    assert (forward.names, backward.names) == (["fused_attention"], ["fused_attention_backward"])


@highest_level_only
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend):
    query, key, value, _ = Case(dtype=torch.float64).build()
    leaves = [x.requires_grad_() for x in (query, key, value)]
    compiled = torch.compile(attention, backend=backend, fullgraph=True)
    for _ in each_level():
        got, want = compiled(*leaves, is_causal=True), attention(*leaves, is_causal=True)
        assert_rounding_only(got, want, leaves)
        assert_rounding_only(
            *(torch.autograd.grad(r[0].sum() + r[1].square().sum(), leaves) for r in (got, want)), leaves
        )


@highest_level_only
def test_on_devices_without_such_a_kernel(monkeypatch):
    """There torch averages the weights of all heads."""
    query, key, value, _ = Case(dtype=torch.float64).build()
    leaves = [x.requires_grad_() for x in (query, key, value)]
    want = attention(*leaves, is_causal=True)
    monkeypatch.setattr(ops, "AVERAGING_DEVICES", ())
    with Calls() as calls:
        got = attention(*leaves, is_causal=True)
    assert len(calls.calls[0][1]) < 19  # average_weights is the last argument
    assert_rounding_only(got, want, leaves)


@highest_level_only
def test_a_query_without_heads_is_refused():
    nothing = torch.randn(2, 0, 3, 4)
    numbers = (nothing, nothing, nothing, 1.0, -torch.inf, UNBOUNDED, True, False)
    with pytest.raises(ValueError, match="average_weights needs heads, got query of shape"):
        ops.fused_attention(*numbers, *[None] * 6, UNBOUNDED, 0, 0.0, 0.0, True)


PROBE = """
import json, sys
import torch, mha_ext
from mha_ext import composition, arguments

H, L = 8, 2048
def status(field):
    line = next(line for line in open("/proc/self/status") if line.startswith(field))
    return int(line.split()[1]) * 1024

def run(length, average):
    torch.manual_seed(0)
    leaves = [torch.randn(1, H, length, 16).requires_grad_() for _ in range(3)]
    before = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
    output, weights = composition.attention(*leaves, arguments.PLAIN, None, None, False, True, average_weights=average)
    weights = weights if average else weights.mean(1)
    (output.sum() + weights.mean()).backward()
    return status("VmHWM") - before

torch.set_num_threads(2)
average = sys.argv[1] == "average"
run(64, average)  # what a first call loads
print(json.dumps(run(L, average)))
"""


@linux
@highest_level_only
def test_memory():
    """The weights of 8 heads at L = 2048 hold 128 MiB, their mean 16, its gradient as much."""
    assert in_new_process(PROBE, "average") < 72 * MIB
    assert in_new_process(PROBE, "all") > 128 * MIB
