"""Type checkers know what a loader yields, in a user's script."""

import importlib.util
import shutil
import subprocess
import sys

import pytest
from helpers import PATIENCE, ROOT

SCRIPT = "tests/loader/typed_script.py"


def check(*command):
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_mypy_knows_what_a_loader_yields():
    found = [sys.executable, "-m", "mypy"] if importlib.util.find_spec("mypy") else [shutil.which("mypy")]
    if found[-1] is None:
        pytest.skip("mypy is not installed")
    # the project's own options, so that what it found in torch before is used again
    check(*found, "--python-executable", sys.executable, SCRIPT)


def test_pyright_knows_it_too():
    if (pyright := shutil.which("pyright")) is None:
        pytest.skip("pyright is not installed")
    check(pyright, "--pythonpath", sys.executable, SCRIPT)
