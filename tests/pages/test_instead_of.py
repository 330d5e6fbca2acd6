"""The page about other programs' loaders shows what an audit of them finds, and what plain loops compute."""

import pytest
from helpers import ROOT
from test_pages import blocks_of

from stream_dataloader.cli.demo import default_clips
from stream_dataloader.streams import VideoStream

PAGE = ROOT / "docs" / "guides" / "instead-of.md"
OUTPUTS = [output for kind, _, output in blocks_of(PAGE) if kind == "python"]
#: Programs whose epoch has many cells.
LARGE = (
    "Transformer-XL, one text",
    "Transformer-XL, sentences",
    "Transformer-XL, 4 files",
    "Dreamer",
    "MiniROAD",
    "TinySleepNet",
)
NAMES = (
    "Video-Pre-Training, 8 workers",
    "Video-Pre-Training, 12 workers",
    "MineStudio, 1 rank",
    "MineStudio, 4 ranks",
    *LARGE,
)


@pytest.fixture
def figures(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return __import__("instead_of")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LARGE)) for name in NAMES])
def test_the_page_shows_what_an_audit_of_its_order_finds(name, figures):
    (shown,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {name} |")]
    assert shown == figures.row(name), "python benchmarks/instead_of.py prints the figures"


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LARGE)) for name in NAMES])
def test_ours_delivers_each_item_once_in_rows_that_go_on(name, figures):
    found = figures.audit_ours(name)
    assert (found.delivered, found.repeats, found.flags[1]) == (found.total, 0, 0), str(found)
    if name != "Dreamer":  # its sections are streams of their own, and may follow their source's next one
        assert found.wrong == [], str(found)
        assert figures.share_going_on(found) == 1


def test_the_table_has_all_of_them(figures):
    assert sorted(NAMES) == sorted(figures.CASES)


def test_recordings_with_actions():
    lengths = [len(list(VideoStream(size=(24, 32))(clip))) for clip in default_clips()]
    kept = [frame for length in lengths for frame in range(length) if frame % 3]
    attacks = sum(frame % 2 == 0 for frame in kept)
    assert OUTPUTS[0] == f"{len(kept)} steps, {attacks} attacks, frame numbers {sum(kept)}\n"


def test_sentences_of_files():
    sentences = ["to be.", "or not to be.", "that is", "the question:", "whether it is", "nobler"]
    targets = [code for sentence in sentences for code in sentence[1:].encode()]
    assert OUTPUTS[1] == f"{len(targets)} tokens of {len(sentences)} sentences, targets {sum(targets)}\n"


def test_features_of_frames():
    frames = [frame for video in range(5) for frame in range(20 + 30 * video)]
    assert OUTPUTS[4] == f"{len(frames)} frames, inputs (32, 2, 12) sum {12 * sum(frames)}\n"


def test_chains_and_nights():
    for line in OUTPUTS[3].splitlines():
        assert line.startswith(f"{3 * 150} steps, each once: True")
    for line in OUTPUTS[5].splitlines():
        assert 0 <= int(line.split()[0]) <= 4 * 6, "each of six nights begins at one of its first five epochs"
        assert ", True " in line, "padding alone has the label of padding"
