"""What setup.py decides about CUDA, and what it says about it. Nothing is compiled here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="an installed package has no setup.py")


def setup(**environment):
    kept = {name: value for name, value in os.environ.items() if name not in ("MHA_EXT_CUDA", "TORCH_CUDA_ARCH_LIST")}
    return subprocess.run(
        [sys.executable, "setup.py", "--name"], cwd=ROOT, env=kept | environment, capture_output=True, text=True
    )


def test_an_unknown_choice_is_refused():
    done = setup(MHA_EXT_CUDA="yes")
    assert done.returncode
    assert "MHA_EXT_CUDA must be auto, 0 or 1, got 'yes'" in done.stderr


def test_without_cuda_nothing_is_said():
    done = setup(MHA_EXT_CUDA="0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["mha_ext"]


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch was built with CUDA")
def test_a_torch_without_cuda():
    done = setup(MHA_EXT_CUDA="1")
    assert done.returncode
    assert f"MHA_EXT_CUDA=1, but torch {torch.__version__} was built without CUDA" in done.stderr
    done = setup()
    assert done.returncode == 0, done.stderr
    assert "building without CUDA, as torch" in done.stdout


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA torch")
@pytest.mark.parametrize(
    ("archs", "text"),
    [
        ("Hopper", "TORCH_CUDA_ARCH_LIST must list architectures like 9.0 or 12.0+PTX, got Hopper"),
        ("7.5;8.0", "the kernels need compute capability 8.0 or later, not 7.5"),
        ("9.0 99.0", "this nvcc does not know sm_990"),
    ],
)
def test_architectures_that_cannot_be(archs, text):
    done = setup(MHA_EXT_CUDA="1", TORCH_CUDA_ARCH_LIST=archs)
    assert done.returncode
    assert f"MHA_EXT_CUDA=1, but {text}" in done.stderr


@pytest.mark.skipif(torch.version.cuda is None or torch.cuda.is_available(), reason="needs a CUDA torch without a GPU")
def test_a_machine_without_gpu():
    done = setup()
    assert done.returncode == 0, done.stderr
    assert "building without CUDA, as" in done.stdout
    assert "MHA_EXT_CUDA=1 builds with it or fails" in done.stdout
