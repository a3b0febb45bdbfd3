"""The benchmark of whole models: does it time what is right, and leave out what is wrong?"""

import sys
from pathlib import Path

import pytest
import torch

from mha_ext.bench.cases import OURS
from mha_ext.bench.records import Run

transformers = pytest.importorskip(
    "transformers", reason="benchmarks.models needs transformers, which is not installed"
)
sys.path.append(str(Path(__file__).parent.parent))  # last, so that mha_ext is the one that is installed

from benchmarks import models  # noqa: E402


@pytest.fixture(autouse=True)
def _threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_program(tmp_path, capsys):
    figures = tmp_path / "models.json"
    assert models.main(["--quick", "--threads", "1", "--json", str(figures)]) == 0
    results = Run.load(figures).results
    names = {f"{size.name}, {kind}" for size in models.QUICK_SIZES for kind in models.PASSES}
    assert {result.name for result in results} == names
    for result in results:
        without_weights = {"HF sdpa"} if "attentions" in result.name else set()
        assert set(result.times) == set(models.IMPLEMENTATIONS) - without_weights, result
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("tiny BERT, training", "HF", "2,9, 2 layers of 2 heads")), shown


def test_what_is_wrong_is_not_timed(monkeypatch):
    def nothing(module, query, key, value, mask, **options):
        return torch.zeros_like(query).transpose(1, 2), None

    transformers.AttentionInterface.register("nothing", nothing)
    monkeypatch.setitem(models.IMPLEMENTATIONS, OURS, "nothing")
    for size in models.QUICK_SIZES:
        for kind in ("forward", "training"):
            result = models.run_case(size, kind, torch.float32, models.QUICK)
            assert [row.contestant for row in result.wrong] == [OURS], result
            assert set(result.times) == {models.EAGER, "HF sdpa"}


def test_nan_and_missing_results_are_infinitely_wrong():
    one, nan = torch.ones(2), torch.tensor([1.0, torch.nan])
    assert models.distance((nan,), (one,)) == models.distance((), (one,)) == float("inf")
    assert models.distance((one * 1.5, one), (one, one)) == 0.5
    assert models.distance((one, one * 1e-9), (one, one * 1e-19)) < 1e-8  # zero but for rounding
