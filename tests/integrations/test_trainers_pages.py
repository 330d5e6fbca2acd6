"""The page on trainers runs and prints what it says; so do the examples."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest
from helpers import PATIENCE, ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (importlib.util.find_spec("accelerate") and importlib.util.find_spec("transformers")),
        reason="needs accelerate and transformers",
    ),
]

PAGE = (ROOT / "docs" / "guides" / "trainers.md").read_text()
PROGRAMS = re.findall(r"^```py\n((?:(?!```).*\n)*)```\n\n```text\n((?:(?!```).*\n)*)```$", PAGE, re.MULTILINE)


def run(program, folder, *arguments):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUTF8": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, program, *arguments],
        check=False,
        capture_output=True,
        encoding="utf-8",
        env=environment,
        timeout=PATIENCE,
        cwd=folder,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(("code", "output"), PROGRAMS, ids=["accelerate", "trainer"])
def test_a_block_prints_what_follows_it(code, output, tmp_path):
    (tmp_path / "program.py").write_text(code)
    assert run(tmp_path / "program.py", tmp_path) == output


SHORT = ["--epochs", "1", "--workers", "0"]
ACCELERATE, LIGHTNING = (ROOT / "examples" / name for name in ("accelerate_loop.py", "lightning_module.py"))
TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize(
    ("program", "ranks"),
    [
        ([ACCELERATE, *SHORT], 1),
        ([LIGHTNING, *SHORT], 1),
        ([ROOT / "examples" / "hf_trainer.py", "--stop-after", "9"], 1),
        pytest.param([*TWO, ACCELERATE, *SHORT, "--stop-after", "4"], 2, marks=pytest.mark.slow),
        pytest.param([LIGHTNING, *SHORT, "--ranks", "2"], 2, marks=pytest.mark.slow),
    ],
    ids=["accelerate", "lightning", "trainer", "accelerate-2", "lightning-2"],
)
def test_an_example_goes_on_with_the_same_losses(program, ranks, tmp_path):
    output = run(program[0], tmp_path, *program[1:])
    assert output.count("the same losses: True\n") == ranks
    for first, last in re.findall(r"loss ([\d.]+) to ([\d.]+)", output):
        assert float(last) < float(first)


def test_the_shared_model_shows_batches(tmp_path):
    output = run(ROOT / "examples" / "byte_model.py", tmp_path)
    assert len(re.findall(r"^batch \d: loss 5\.\d+, lane 0 reads '", output, re.MULTILINE)) == 3
