"""The compiled parts must fit: a call with other arguments than an operator takes reads what is not there."""

from types import SimpleNamespace

import pytest
import torch

from mha_ext import _load


def load_cuda(monkeypatch, **attributes):
    library = SimpleNamespace(__file__="/elsewhere/_C_cuda.so", **attributes)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(_load, "_load", lambda name: library)
    return _load.load_cuda(), library


@pytest.mark.parametrize(
    "attributes", [{}, {"schemas": "fused_attention(Tensor query) -> Tensor\n"}], ids=["old", "other"]
)
def test_cuda_kernels_of_other_sources_are_refused(monkeypatch, attributes):
    with pytest.raises(ImportError, match=r"^/elsewhere/_C_cuda.so and .*_C\..* were built from different sources: "):
        load_cuda(monkeypatch, **attributes)


def test_cuda_kernels_of_the_same_operators_are_taken(monkeypatch):
    loaded, library = load_cuda(monkeypatch, schemas=_load.core.schemas)
    assert loaded is library
    names = [line.split("(")[0] for line in _load.core.schemas.splitlines()]
    assert {"attention_scores", "fused_attention", "fused_attention_backward"} <= set(names)
    assert all(hasattr(torch.ops.mha_ext, name) for name in names)
