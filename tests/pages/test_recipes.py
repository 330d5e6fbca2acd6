"""What recipes and the page about lanes print is what plain loops compute."""

import ast
import re

import numpy as np
import pytest
from helpers import ROOT
from serial_model import Serial
from test_pages import blocks_of
from test_values import shuffled

from stream_dataloader.cli.demo import default_clips
from stream_dataloader.streams import VideoStream


@pytest.fixture(scope="module")
def frames():
    """How many frames each of the demo's clips has."""
    return [len(list(VideoStream(size=(24, 32))(clip))) for clip in default_clips()]


def output_of(page, name):
    """The output of the first block behind a heading."""
    text = (ROOT / "docs" / page).read_text()
    return re.search(rf"^## {re.escape(name)}$.*?^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1]


def batches_of(lengths, lanes, steps, order, lookahead=1):
    model = Serial(
        lambda n: [(order[n], i) for i in range(lengths[order[n]])],
        len(order), lanes, steps, "aligned", "zeros", lookahead,
    )  # fmt: skip
    return sum(1 for _ in model.batches())


def test_labels_of_single_frames(frames):
    labels = [len(range(0, length, 5)) for length in frames[:4]]
    counts = [batches_of(lengths, 2, 8, range(4)) for lengths in (frames[:4], labels)]
    expected = [f"{sum(labels)} labels in {count} batches" for count in counts]
    assert output_of("guides/cookbook.md", "Labels of single frames").splitlines() == expected


def test_a_chain_of_files(frames):
    lengths = [sum(frames[:3]), sum(frames[3:5]), frames[5]]
    last = [length - 1 for length in lengths]
    expected = f"3 recordings, last positions {last} {lengths}\n"
    assert output_of("guides/cookbook.md", "A chain of files") == expected


def test_tables_of_time_series():
    table = sum(t + (t + station) for station in range(3) for t in range(5 + station))
    grids = sum(year - 2023 for year in (2024, 2025)) * 6 * 2 * 3
    expected = f"CSV {float(table)}\nNetCDF {float(grids)}\n"
    assert output_of("guides/cookbook.md", "Tables of time series") == expected


def test_nights_in_edf_files():
    microvolts = 0.1 * 3000 * sum(sum(range(records)) for records in (40, 50, 60))
    assert output_of("guides/cookbook.md", "Nights in EDF files") == f"(20, 2, 3000) {microvolts:.0f} uV\n"


def test_live_topics_and_queues():
    assert output_of("guides/cookbook.md", "Live topics and queues") == f"{[True, True]}\n"


def test_few_streams_per_lane():
    lengths = np.random.default_rng(0).lognormal(6, 0.7, 40).astype(int).tolist()
    longest_first = sorted(range(40), key=lambda n: -lengths[n])
    first, *lines = output_of("concepts/lanes.md", "Few streams per lane").splitlines()
    assert first == f"40 streams of {min(lengths)} to {max(lengths)} steps"
    for line in lines:
        lanes, printed = int(line.split()[0]), ast.literal_eval(line[line.index("{") :])

        def padding(order, lookahead, lanes=lanes):
            return 1 - sum(lengths) / (batches_of(lengths, lanes, 16, order, lookahead) * 16 * lanes)

        listed = np.mean([padding(shuffled(40, epoch), 1) for epoch in range(8)])
        assert printed[None] == f"{listed:.0%}"
        assert printed["longest_first"] == f"{padding(longest_first, 0):.0%}"
        assert listed > float(printed["balanced"].rstrip("%")) / 100 > padding(longest_first, 0)
    assert [line.split()[0] for line in lines] == ["16", "8", "4"]
    assert blocks_of(ROOT / "docs" / "concepts" / "lanes.md")
