"""The type hints as a user's type checker meets them: the package in site-packages, the program elsewhere."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

import mha_ext

pytest.importorskip("mypy", reason="mypy is not installed: pip install 'mha_ext[test]'")
PACKAGE = Path(mha_ext.__file__).parent
PROGRAM = Path(__file__).with_name("typed_user.py")


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    """An environment in which mha_ext is installed, and torch beside it. Only there mypy looks for py.typed."""
    folder = tmp_path_factory.mktemp("user")
    venv.create(folder, with_pip=False, symlinks=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (site_packages / "mha_ext").symlink_to(PACKAGE)
    (site_packages / "others.pth").write_text(str(Path(torch.__file__).parent.parent))
    return folder


def mypy(user, program):
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--python-executable", user / "bin/python"]
    return subprocess.run(
        [*command, "--cache-dir", user / "cache", program], cwd=user, capture_output=True, text=True, check=False
    )


def test_a_users_program_passes_strictly(user):
    done = mypy(user, PROGRAM)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_wrong_program_does_not(user, tmp_path):
    """Untyped, the package would let everything pass."""
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import mha_ext\nmha_ext.scaled_dot_product_attention(1, 2, 3)\n")
    assert mypy(user, wrong).stdout.count("[arg-type]") == 3
