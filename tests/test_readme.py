"""The README's code runs, and prints what the README says."""

import pathlib
import re
import subprocess
import sys

import pytest

README = pathlib.Path(__file__).parents[1] / "README.md"
SCALE = README.parent / "docs" / "scale.md"
BLOCK = r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?"
BLOCKS = re.findall(BLOCK, README.read_text(), re.DOTALL)


def test_the_readme_has_code_and_every_output_has_something():
    assert len(BLOCKS) >= 4
    assert BLOCKS[0][1]


@pytest.mark.parametrize(("code", "output"), BLOCKS)
def test_a_block_prints_what_follows_it(code, output, tmp_path):
    script = tmp_path / "block.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == output


def test_the_page_on_scale_has_code_that_runs(tmp_path):
    ((code, _),) = re.findall(BLOCK, SCALE.read_text(), re.DOTALL)
    script = tmp_path / "block.py"
    script.write_text(code)
    command = [sys.executable, "-W", "ignore:ranks cannot agree", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    sources = [int(index) for index in re.findall(r"\d+", done.stdout)]
    assert len(set(sources)) == 4
    assert max(sources) > 10**7
