"""The page on trainers runs and prints what it says; so do the examples."""

import importlib.util
import re

import pytest
from helpers import ROOT, run_program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (importlib.util.find_spec("accelerate") and importlib.util.find_spec("transformers")),
        reason="needs accelerate and transformers",
    ),
]

PAGE = (ROOT / "docs" / "guides" / "trainers.md").read_text()
PROGRAMS = re.findall(r"^```py\n((?:(?!```).*\n)*)```\n\n```text\n((?:(?!```).*\n)*)```$", PAGE, re.MULTILINE)


def run(program, folder, *arguments, **options):
    return run_program(program, *arguments, folder=folder, CUDA_VISIBLE_DEVICES="", **options)


@pytest.mark.parametrize(("code", "output"), PROGRAMS, ids=["accelerate", "trainer"])
def test_a_block_prints_what_follows_it(code, output, tmp_path):
    (tmp_path / "program.py").write_text(code)
    assert run(tmp_path / "program.py", tmp_path) == output


SHORT = ["--epochs", "1", "--workers", "0"]
ACCELERATE, LIGHTNING = (ROOT / "examples" / name for name in ("accelerate_loop.py", "lightning_module.py"))


@pytest.mark.parametrize(
    ("program", "arguments", "ranks", "told"),
    [
        (ACCELERATE, SHORT, 1, 1),
        (LIGHTNING, SHORT, 1, 1),
        (ROOT / "examples" / "hf_trainer.py", ["--stop-after", "9"], 1, 1),
        (ACCELERATE, [*SHORT, "--stop-after", "4"], 2, 2),
        (LIGHTNING, [*SHORT, "--ranks", "2"], 1, 2),
    ],
    ids=["accelerate", "lightning", "trainer", "accelerate-2", "lightning-2"],
)
def test_an_example_goes_on_with_the_same_losses(program, arguments, ranks, told, tmp_path):
    output = run(program, tmp_path, *arguments, ranks=ranks)
    assert output.count("the same losses: True\n") == told
    for first, last in re.findall(r"loss ([\d.]+) to ([\d.]+)", output):
        assert float(last) < float(first)


def test_the_shared_model_shows_batches(tmp_path):
    output = run(ROOT / "examples" / "byte_model.py", tmp_path)
    assert len(re.findall(r"^batch \d: loss 5\.\d+, lane 0 reads '", output, re.MULTILINE)) == 3
