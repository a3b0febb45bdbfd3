"""What the documentation shows runs: Python blocks of README.md and docs/, and the docstrings' examples. What it links
to is there."""

import doctest
import importlib
import pkgutil
import re
import sys
import types
from pathlib import Path

import pytest
import torch

import mha_ext

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(
        ROOT / name
        for name in (
            "README.md",
            "CONTRIBUTING.md",
            "CHANGELOG.md",
            "benchmarks/README.md",
            "csrc/README.md",
            "csrc/cpu/README.md",
            "tests/ptxvm/README.md",
        )
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
]
MODULES = sorted(
    m.name for m in pkgutil.walk_packages(mha_ext.__path__, "mha_ext.") if not m.name.rpartition(".")[2].startswith("_")
)
NEEDED = {"onnx": "onnxscript"}  # by an integration, where that is not the library of its name
PUBLIC = [name for name in mha_ext.__all__ if name != "reference"]


def skip_without(name, text):
    """Skip the test where the module ``name`` is, or is an integration with, a library that is not installed."""
    library = name.partition(".")[0]
    if name.startswith("mha_ext.integrations."):
        library = NEEDED.get(name.rpartition(".")[2], name.rpartition(".")[2])
    pytest.importorskip(library, reason=f"{text} needs {library}, which is not installed")


def blocks(page):
    """The text of each ```python block with the line it starts on."""
    text = page.read_text()
    return [
        (text[: m.start()].count("\n") + 2, m.group(1))
        for m in re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S)
    ]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page, tmp_path, monkeypatch):
    """The blocks of one page run in order in one namespace, as a reader would type them."""
    for _, code in blocks(page):
        for name in re.findall(r"^(?:import|from) ([\w.]+)", code, re.M):
            skip_without(name, f"the code of {page.name}")
    monkeypatch.chdir(tmp_path)
    attention = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)  # pages may put ours there
    module = types.ModuleType("page")  # a real module: torch.compile looks names up there
    monkeypatch.setitem(sys.modules, module.__name__, module)
    namespace = vars(module)
    for line, code in blocks(page):
        torch.manual_seed(0)
        source = "\n" * (line - 1) + code
        if ">>>" in code:
            test = doctest.DocTestParser().get_doctest(code, namespace, page.name, str(page), line)
            assert doctest.DocTestRunner(verbose=False).run(test).failed == 0, f"{page.name}:{line}"
        else:
            exec(compile(source, str(page), "exec"), namespace)


def test_readme_shows_something():
    assert blocks(ROOT / "README.md")


@pytest.mark.parametrize("name", ["mha_ext", *MODULES])
def test_doctests(name):
    torch.manual_seed(0)
    skip_without(name, f"the example of {name}")
    outcome = doctest.testmod(importlib.import_module(name), verbose=False)
    assert outcome.failed == 0


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented_with_an_example(name):
    text = getattr(mha_ext, name).__doc__
    assert text, f"{name} has no docstring"
    assert ">>>" in text, f"{name} shows no example"


def test_the_reference_has_every_public_name():
    shown = {
        name
        for page in (ROOT / "docs/reference").glob("*.md")
        for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)
    }
    assert {f"mha_ext.{name}" for name in PUBLIC if name != "nn"} - shown == set()
    for path in (ROOT / "mha_ext/integrations").glob("[a-z]*.py"):
        assert any(name.startswith(f"mha_ext.integrations.{path.stem}") for name in shown), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)", text) + re.findall(r"^\[[^]]+\]: ([^#\s]+)", text, re.M):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_links_are_defined_used_and_name_tests_that_exist(page):
    """``[name]: ../tests/test_x.py "test_y"`` says that test_y shows what the text claims."""
    text = re.sub(r"^```.*?^```|`[^`\n]+`", "", page.read_text(), flags=re.M | re.S)
    definitions = dict(re.findall(r"^\[([^]]+)\]: (.+)$", text, re.M))
    assert set(re.findall(r"\]\[([^]]+)\]", text)) == set(definitions)
    for target, test in (re.fullmatch(r'(\S+)(?: "(\w+)")?', rest).groups() for rest in definitions.values()):
        assert bool(test) == target.startswith("../tests/"), f"{page.name}: {target} {test}"
        if test:
            assert f"\ndef {test}(" in (page.parent / target).read_text(), f"{page.name}: {target} has no {test}"
