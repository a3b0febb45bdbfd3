"""The benchmark of whole models: does it time what is right, and leave out what is wrong?"""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from mha_ext.bench.cases import OURS
from mha_ext.bench.records import Run
from mha_ext.bench.timing import QUICK

sys.path.append(str(Path(__file__).parent.parent))  # last, so that mha_ext is the one that is installed

from benchmarks.models import __main__ as program
from benchmarks.models import measure, with_torch


@pytest.fixture(autouse=True)
def _threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=program.LIBRARIES)
def library(request):
    pytest.importorskip(request.param, reason=f"its models need {request.param}, which is not installed")
    return importlib.import_module(f"benchmarks.models.with_{request.param}").LIBRARY


def test_the_program(library, tmp_path, capsys):
    figures = tmp_path / "models.json"
    options = ["--quick", "--threads", "1", "--json", str(figures), "--libraries", library.package]
    assert program.main(options) == 0
    run = Run.load(figures)
    assert set(run.machine["libraries"]) == {OURS, *library.ways}
    assert not run.machine["missing"]
    shown = capsys.readouterr().out
    for result in run.results:
        without_weights = {"HF sdpa"} if "attentions" in result.name else set()
        assert set(result.times) == {OURS, *library.ways} - without_weights, result
        assert result.name in shown
    names = {f"{model.name}, {kind}" for model in library.quick_models for kind in measure.PASSES}
    assert {result.name for result in run.results} == names - {"tiny TransformerEncoder, attentions"}


def test_what_is_missing_is_told(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.delitem(sys.modules, "benchmarks.models.with_timm", raising=False)
    assert program.main(["--quick", "--libraries", "timm", "torch", "--cases", "forward", "--dtype", "f32"]) == 0
    shown = capsys.readouterr().out
    assert "import of timm halted" in shown
    assert "tiny TransformerEncoder, forward" in shown


class Wrong(nn.MultiheadAttention):
    """Off by a thousandth."""

    def forward(self, *args, **kwargs):
        output, weights = super().forward(*args, **kwargs)
        return output * 1.001, weights


def test_what_is_wrong_is_not_timed(monkeypatch):
    def with_a_wrong_one(way, model):
        wrong = nn.MultiheadAttention(32, 2, batch_first=True).eval()
        wrong.load_state_dict(model.state_dict())
        wrong.__class__ = Wrong
        return {way: model, OURS: wrong}

    monkeypatch.setattr(with_torch, "beside_ours", with_a_wrong_one)
    layer = with_torch.QUICK_MODELS[1]
    for kind in measure.PASSES:
        result = measure.run_case(layer, kind, torch.float32, QUICK)
        assert [row.contestant for row in result.wrong] == [OURS], result
        assert set(result.times) == {"torch.nn"}


def test_nan_and_missing_results_are_infinitely_wrong():
    one, nan = torch.ones(2), torch.tensor([1.0, torch.nan])
    assert measure.distance((nan,), (one,)) == measure.distance((), (one,)) == float("inf")
    assert measure.distance((one * 1.5, one), (one, one)) == 0.5
    assert measure.distance((one, one * 1e-9), (one, one * 1e-19)) < 1e-8  # zero but for rounding
