"""The tutorial runs from top to bottom, shows what it says, and is saved without what it showed."""

import json
import re

import nbformat
import pytest
from helpers import ROOT, run_notebook

TUTORIAL = ROOT / "docs" / "tutorial.ipynb"


def test_it_is_saved_without_outputs():
    cells = json.loads(TUTORIAL.read_text())["cells"]
    assert [cell["id"] for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


def test_its_links_lead_somewhere():
    text = "".join(cell.source for cell in nbformat.read(TUTORIAL, 4).cells)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert targets
    assert [target for target in targets if not (TUTORIAL.parent / target.split("#")[0]).exists()] == []


slow = pytest.mark.slow  # it takes seconds to run


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tutorial")
    run_notebook(TUTORIAL, folder / "done.ipynb", folder)
    return [output for cell in nbformat.read(folder / "done.ipynb", 4).cells for output in cell.get("outputs", [])]


@slow
def test_it_runs_without_error_or_warning(executed):
    assert [output.evalue for output in executed if output.output_type == "error"] == []
    assert [output.text for output in executed if output.get("name") == "stderr"] == []


@slow
def test_it_shows_what_it_says(executed):
    printed = "".join(output.text for output in executed if output.get("name") == "stdout")
    assert "the same as without it: True" in printed
    losses = list(map(float, re.findall(r"^epoch \d+: loss (.*)$", printed, re.MULTILINE)))
    assert losses[-1] < losses[0] / 3
    shown = [output.data for output in executed if output.output_type == "execute_result"]
    assert sum("data:image/png;base64" in data.get("text/html", "") for data in shown) == 2  # batches
    assert any("image/svg+xml" in data or "<pre" in data.get("text/html", "") for data in shown)  # the timeline
