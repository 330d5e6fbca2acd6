"""The proofs run, in a small version; the page shows what was measured."""

import json

import pytest
from helpers import ROOT, run_program

ASSETS = ROOT / "docs" / "assets"
#: The figures of each proof.
FIGURES = {
    "stateful_finish": ["stateful_finish.png", "stateful_finish_orders.png"],
    "behind_the_wall": ["behind_the_wall.png"],
    "key_frames": ["key_frames.png"],
    "sequential_decoding": ["sequential_decoding.png"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_a_small_version_writes_figures_and_numbers(name, tmp_path):
    pytest.importorskip("matplotlib", reason="install the extra plot")
    out = tmp_path / "out"
    options = ["--quick", "--jobs", "1", "--out", out]
    run_program(ROOT / "benchmarks" / f"{name}.py", *options, PYTHONPATH=str(ROOT), TMPDIR=str(tmp_path))
    assert sorted(path.name for path in out.iterdir()) == sorted([f"{name}.json", *FIGURES[name]])
    assert all((out / figure).read_bytes()[1:4] == b"PNG" for figure in FIGURES[name])
    assert "made_with" in json.loads((out / f"{name}.json").read_text())


@pytest.mark.parametrize("name", FIGURES)
def test_the_page_has_the_tables_and_figures_that_were_written(name, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    page = (ROOT / "docs" / "proof.md").read_text()
    numbers = json.loads((ASSETS / f"{name}.json").read_text())
    for table in __import__(name).tables(numbers):
        assert table in page
    for figure in FIGURES[name]:
        assert f"(assets/{figure})" in page
        assert (ASSETS / figure).exists()
