"""torch.export and AOTInductor: a model saved, loaded and run at other sizes in a process that never made it."""

import os
import subprocess
import sys

import pytest
import torch
from language_model import LanguageModel, text
from tolerances import assert_rounding_only

import mha_ext

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")]
DYNAMIC = torch.export.Dim.DYNAMIC


class Logits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = LanguageModel()

    def forward(self, tokens, lengths):
        return (self.model.logits(tokens, lengths)[0],)


class Everything(torch.nn.Module):
    """What a server of long texts may ask for, the weights included; batch and lengths change from call to call."""

    def forward(self, query, key, bias, lengths):
        return mha_ext.attention(
            query, key, key, bias=bias, is_causal=True, causal_offset="lower_right", window=(5, None),
            key_lengths=lengths, softcap=2.0, enable_gqa=True,
        )  # fmt: skip


def of_everything(batch, queries, keys):
    return (
        torch.randn(batch, 4, queries, 8, dtype=torch.float64),
        torch.randn(batch, 2, keys, 8, dtype=torch.float64),
        torch.randn(4, queries, keys, dtype=torch.float64),
        torch.randint(0, keys + 1, (batch,)),
    )


MODELS = {
    "language_model": (
        Logits, ({0: DYNAMIC, 1: DYNAMIC}, {0: DYNAMIC}), lambda batch, length: text(batch, length),
        [(4, 9), (2, 5), (3, 40)],
    ),
    "everything": (
        Everything, ({0: DYNAMIC, 2: DYNAMIC}, {0: DYNAMIC, 2: DYNAMIC}, {1: DYNAMIC, 2: DYNAMIC}, {0: DYNAMIC}),
        of_everything, [(2, 3, 7), (3, 5, 11), (4, 9, 6), (2, 40, 50)],
    ),
}  # fmt: skip


def in_a_new_process(code, folder):
    """Run code that has imported torch and mha_ext, whose operators the saved programs name, and nothing else."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # the package need not be installed
    start = "import torch, mha_ext; torch.set_num_threads(1)\ncalls = torch.load('calls.pt')\n"
    end = "torch.save([run(*call) for call in calls], 'results.pt')"
    subprocess.run([sys.executable, "-c", start + code + end], check=True, cwd=folder, env=environment, timeout=300)
    return torch.load(folder / "results.pt")


def check_in_a_new_process(name, code, folder, exported):
    module, _, inputs, sizes = exported
    calls = [inputs(*size) for size in sizes]
    torch.save(calls, folder / "calls.pt")
    for size, call, got in zip(sizes, calls, in_a_new_process(code, folder), strict=True):
        terms = [x for x in call if x.is_floating_point()] + list(module.parameters())
        assert_rounding_only(got, module(*call), terms, f"{name} {size}")


@pytest.fixture(params=MODELS)
def program(request):
    kind, shapes, inputs, sizes = MODELS[request.param]
    module = kind().eval()
    with torch.no_grad():
        exported = torch.export.export(module, inputs(*sizes[0]), dynamic_shapes=shapes)
        yield request.param, exported, (module, shapes, inputs, sizes)


def test_saved_and_loaded(program, tmp_path):
    name, exported, of = program
    torch.export.save(exported, tmp_path / "model.pt2")
    code = "run = torch.export.load('model.pt2').module()\n"
    check_in_a_new_process(name, code, tmp_path, of)
    ours = {str(node.target) for node in exported.graph.nodes if "mha_ext" in str(node.target)}
    assert ours == {"mha_ext.fused_attention.default"}


class Attend(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, query, key, mask):
        return mha_ext.attention(query * 2, key, key, mask, is_causal=True, softcap=2.0, **self.options)


def of_attend(batch, queries, keys):
    query, key, _, _ = of_everything(batch, queries, keys)
    return query, key.repeat(1, 2, 1, 1), torch.rand(batch, 1, queries, keys) < 0.7


@pytest.mark.parametrize("options", [{}, {"mask_value": -1e9}], ids=["default", "finite_mask_value"])
def test_compiled_ahead_of_time(options, tmp_path):
    """AOTInductor: machine code that calls the operators, packaged, loaded and run."""
    shapes = ({0: DYNAMIC, 2: DYNAMIC}, {0: DYNAMIC, 2: DYNAMIC}, {0: DYNAMIC, 2: DYNAMIC, 3: DYNAMIC})
    of = Attend(**options), shapes, of_attend, [(2, 3, 7), (3, 5, 11), (4, 40, 50)]
    exported = torch.export.export(of[0], of_attend(2, 3, 7), dynamic_shapes=shapes)
    torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
    code = "run = torch._inductor.aoti_load_package('model.pt2')\n"
    check_in_a_new_process("attention", code, tmp_path, of)
