"""Loads the compiled part of the package and remembers what could not be loaded, and why."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch  # also loads libtorch, which the compiled part is linked against

_PACKAGE = Path(__file__).resolve().parent

#: Where each shared object came from, or why it is not there; shown by ``mha-ext info``.
shared_objects: dict[str, str] = {}


def _installed_twin(name: str) -> Path | None:
    """The library of an installed mha_ext, when this source tree hides the installation: after ``pip install .``,
    Python started in the repository root imports ./mha_ext, which holds no compiled part."""
    filename = f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    for entry in sys.path:
        candidate = Path(entry or ".").resolve() / "mha_ext" / filename
        if candidate.parent != _PACKAGE and candidate.is_file():
            return candidate
    return None


def _load_file(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"mha_ext.{name}", path)
    assert spec is not None  # the path ends in this Python's own suffix
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[spec.name] = module
    return module


def _load(name: str) -> ModuleType | None:
    """The compiled module of that name, None if it was not built."""
    try:
        module = importlib.import_module(f"mha_ext.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"mha_ext.{name}":
            raise
        twin = _installed_twin(name)
        # _C and _C_cuda must be of one build: their operators have one list of arguments.
        if twin is None or twin.parent != Path(shared_objects.get("_C", twin)).parent:
            return None
        module = _load_file(name, twin)
    shared_objects[name] = str(module.__file__)
    return module


def load_core() -> ModuleType:
    """Import ``mha_ext._C``, which registers the operators ``torch.ops.mha_ext.*``.

    Raises:
        ImportError: it is not built; the text says how to build it.
    """
    module = _load("_C")
    if module is None:
        raise ImportError(
            f"the compiled part of mha_ext is missing from {_PACKAGE}: run `pip install .` in the repository root"
        )
    return module


def load_cuda() -> ModuleType | None:
    """Import ``mha_ext._C_cuda``, which adds the CUDA implementations; None where that cannot be.

    Raises:
        ImportError: its operators take other arguments than those of ``mha_ext._C``, so that a call would read what is
            not there.
    """
    if torch.version.cuda is None:
        shared_objects["_C_cuda"] = f"not loaded: torch {torch.__version__} was built without CUDA"
        return None
    try:
        module = _load("_C_cuda")
    except ImportError as error:
        shared_objects["_C_cuda"] = f"not loaded: {error}"
        return None
    if module is None:
        shared_objects["_C_cuda"] = "not built: see README.md for MHA_EXT_CUDA=1"
    elif getattr(module, "schemas", "none") != getattr(core, "schemas", None):  # old builds have no such list
        raise ImportError(
            f"{module.__file__} and {core.__file__} were built from different sources: build both, or remove the former"
        )
    return module


def why_no_gpu() -> str | None:
    """What keeps the CUDA kernels from running here, if anything does."""
    if cuda is None:
        return f"CUDA library {shared_objects['_C_cuda']}"
    return None if torch.cuda.is_available() else "torch sees no GPU"


core = load_core()
cuda = load_cuda()
