"""What the fused operator costs and where it may run: memory, threads, processes, torch.compile and export."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import Case
from tolerances import assert_rounding_only, assert_same_bits
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils.data import DataLoader, Dataset

import mha_ext

MIB = 2**20

# Prints how far the process's memory rose above inputs, results and gradients while a call and its backward ran.
PROBE = """
import json, sys
import torch, mha_ext

L = 8192
def status(field):
    line = next(line for line in open("/proc/self/status") if line.startswith(field))
    return int(line.split()[1]) * 1024

def parts(heads, d, dv):
    return [torch.randn(1, heads, L, n).requires_grad_() for n in (d, d, dv)]

def dropout(): return parts(1, 32, 32), {"dropout": 0.1}
def bias(): return parts(1, 32, 32), {"bias": torch.zeros(L, L).requires_grad_()}
def bias_per_key(): return parts(2, 16, 16), {"bias": torch.zeros(2, 1, L).requires_grad_()}
def padding(): return parts(1, 32, 32), {"mask": torch.arange(L) < 7000, "key_lengths": torch.tensor([6000])}
def value_size(): return parts(1, 32, 80), {}
def options(): return parts(1, 32, 32), {"softcap": 5.0, "sinks": torch.zeros(1).requires_grad_(), "is_causal": True,
                                         "window": (3000, None), "mask_value": -1e9}

def run(inputs, given, by_steps):
    torch.set_num_threads(2)
    extra = {"dropout": lambda w: w} if by_steps else {}
    output, weights = mha_ext.attention(*inputs, **{**given, **extra}, need_weights=False)
    assert weights is None
    leaves = inputs + [x for x in given.values() if torch.is_tensor(x) and x.requires_grad]
    return output, *torch.autograd.grad(output.sum(), leaves)

name, by_steps = sys.argv[1], sys.argv[2] == "steps"
run([torch.randn(1, 1, 64, 32).requires_grad_() for _ in range(3)], {"dropout": 0.5}, False)  # what a first call loads
inputs, given = globals()[name]()
open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
before = status("VmRSS")
results = run(inputs, given, by_steps)
print(json.dumps(status("VmHWM") - before - sum(x.numel() * x.element_size() for x in results)))
"""


def in_new_process(code, *arguments, timeout=300):
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self")


@linux
@pytest.mark.parametrize("name", ["dropout", "bias", "bias_per_key", "padding", "value_size", "options"])
def test_no_matrix_of_scores(name):
    """At L = 8192 such a matrix would hold 256 MiB."""
    assert in_new_process(PROBE, name, "fused") < 40 * MIB


@linux
def test_the_probe_sees_a_matrix_of_scores():
    """The three steps make several; so the figures above come from a meter that works."""
    assert in_new_process(PROBE, "value_size", "steps") > 256 * MIB


# Prints the CPU time that other threads than the calling one took, as a part of the whole.
OTHERS = """
import json, sys, time
import torch, mha_ext

threads = int(sys.argv[1])
torch.set_num_threads(threads)
x = torch.randn(1, 4, 512, 64).requires_grad_()
def run(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        output, _ = mha_ext.attention(x, x, x, need_weights=False)
        torch.autograd.grad(output.sum(), x)
run(0.2)
own, whole = time.thread_time(), time.process_time()
run(1.0)
own, whole = time.thread_time() - own, time.process_time() - whole
print(json.dumps(1 - own / whole))
"""


def test_one_thread_means_one_thread():
    assert in_new_process(OTHERS, "1") < 0.05


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor")
def test_two_threads_share_the_work():
    """Both take tasks, in the forward and in the backward."""
    assert in_new_process(OTHERS, "2") > 0.2


def call_with_gradients(seed):
    case = Case(batch=(2,), heads=4, lq=130, lk=150, d=32, is_causal=True, bias="heads", seed=seed)
    query, key, value, options = case.build()
    leaves = [x.requires_grad_() for x in (query, key, value, options["bias"])]
    generator = torch.Generator().manual_seed(seed)
    output, weights = mha_ext.attention(*leaves[:3], **options, dropout=0.2, generator=generator)
    return output.detach(), weights.detach(), *torch.autograd.grad(output.sum() + weights.sin().sum(), leaves)


@pytest.mark.parametrize("threads", [1, 2])
def test_several_python_threads_at_once(threads):
    torch.set_num_threads(threads)
    alone = [call_with_gradients(seed) for seed in range(6)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(call_with_gradients, [*range(6), *range(6)]))
    for got, want in zip(together, alone * 2, strict=True):
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a, b)


class Attended(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return call_with_gradients(index)


def test_in_forked_workers():
    """A DataLoader's workers are forks of a process whose threads have been at work."""
    torch.set_num_threads(2)
    want = [call_with_gradients(index) for index in range(4)]
    loader = DataLoader(Attended(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60)
    for got, right in zip(loader, want, strict=True):
        for a, b in zip(got, right, strict=True):
            assert_same_bits(a, b)


def test_inference_mode():
    query, key, value, options = Case(mask="full", bias="heads", sinks=True).build()
    want = mha_ext.attention(query, key, value, **options)
    with torch.inference_mode():
        got = mha_ext.attention(query.requires_grad_(), key, value, **options)
        inside = mha_ext.attention(query + 0, key + 0, value + 0, **options)  # inference tensors as inputs
    for other in (got, inside):
        for a, b in zip(other, want, strict=True):
            assert a.is_inference()
            assert_same_bits(a, b)


def captured(call, *arguments):
    """Results of the compiled call, and the operators in its forward and backward graphs."""
    graphs = []

    def note(graph, _):
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return make_boxed_func(graph.forward)

    compiled = torch.compile(call, backend=aot_autograd(fw_compiler=note, bw_compiler=note), fullgraph=True)
    output = compiled(*arguments)
    grads = torch.autograd.grad(output.sin().sum(), arguments)
    return (output, *grads), graphs


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("layout", ["contiguous", "blhd"])
def test_compiled_graphs_hold_the_fused_operators(layout):
    case = Case(dtype=torch.float64, heads=4, kv_heads=2, mask="full", bias="heads", sinks=True, layout=layout)
    query, key, value, options = case.build()
    leaves = [x.requires_grad_() for x in (query, key, value, options.pop("bias"), options.pop("sinks"))]

    def call(query, key, value, bias, sinks):
        return mha_ext.attention(query, key, value, bias=bias, sinks=sinks, **options, need_weights=False)[0]

    got, (forward, backward) = captured(call, *leaves)
    output = call(*leaves)
    assert_rounding_only(got, (output, *torch.autograd.grad(output.sin().sum(), leaves)), leaves)
    assert got[0].stride() == output.stride()
    assert "mha_ext.fused_attention.default" in forward
    assert "mha_ext.fused_attention_backward.default" in backward
    assert not any("softmax" in name for name in (*forward, *backward))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("need_weights", [True, False])
def test_inductor(need_weights):
    case = Case(dtype=torch.float64, lq=20, lk=30, is_causal=True, softcap=2.0, layout="blhd")
    query, key, value, options = case.build()
    leaves = [x.requires_grad_() for x in (query, key, value)]

    def call(query, key, value):
        output, weights = mha_ext.attention(query * 2, key, value, **options, need_weights=need_weights)
        return output.sin().sum() + (weights.square().sum() if need_weights else 0)

    got, want = (f(*leaves) for f in (torch.compile(call, fullgraph=True), call))
    assert_rounding_only(got, want, leaves)
    assert_rounding_only(torch.autograd.grad(got, leaves), torch.autograd.grad(want, leaves), leaves)


@pytest.mark.usefixtures("fresh_compiler")
def test_dynamic_shapes_without_weights():
    """One graph serves every length and both layouts' results have the strides of an eager call."""

    def call(query, key, value):
        return mha_ext.attention(query, key, value, is_causal=True, dropout=0.0, need_weights=False)[0]

    for layout in ("contiguous", "blhd"):
        torch.compiler.reset()
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for lq, lk in ((5, 7), (9, 6), (17, 30)):
                case = Case(dtype=torch.float64, batch=(3,), heads=2, lq=lq, lk=lk, layout=layout)
                leaves = [x.requires_grad_() for x in case.build()[:3]]
                got, want = compiled(*leaves), call(*leaves)
                assert got.stride() == want.stride()
                assert_rounding_only(got, want, leaves)
                grads = [torch.autograd.grad(x.sin().sum(), leaves) for x in (got, want)]
                assert_rounding_only(*grads, leaves)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    """An exported twin holds one operator of ours and runs at other lengths."""

    class Twin(torch.nn.Module):
        def forward(self, query, key, value):
            return mha_ext.scaled_dot_product_attention(query, key, value, is_causal=True)

    length = {2: torch.export.Dim("length", min=2)}
    given = Case(dtype=torch.float64, lk=5).build()[:3]
    program = torch.export.export(Twin(), given, strict=strict, dynamic_shapes=(length, length, length))
    longer = Case(dtype=torch.float64, lq=9, lk=9).build()[:3]
    assert_rounding_only(program.module()(*longer), Twin()(*longer), longer)
    names = [str(node.target) for node in program.graph.nodes if str(node.target).startswith("mha_ext.")]
    assert names == ["mha_ext.fused_attention.default"]
