"""One lane by itself: windows that it cuts, and what goes into them."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from stream_dataloader import LengthError, ReadError, StreamDataset
from stream_dataloader._items.step_writer import step_writer
from stream_dataloader._reading.begin import read_here
from stream_dataloader._reading.share import Reading, Start
from stream_dataloader._schedule.rules import NEVER
from stream_dataloader._schedule.snapshot import LaneState, Snapshot


def read(text):
    """Its characters; `!` is where it breaks."""
    for character in text:
        if character == "!":
            raise OSError("the disk is broken")
        yield character


@pytest.fixture
def lane_of():
    """Makes the only lane of a dataset of texts."""
    readers = []

    def make(*texts, resume=None, open_stream=read, **options):
        given = {"time_steps": 4, "lookahead": 0, "seed": 0} | options
        plan = StreamDataset(texts, open_stream, 1, **given).plan()
        (begin,) = read_here(Reading.alone(plan, Start(0, resume)))
        reader = begin()
        reader.share.queue.publish(NEVER)  # its tickets wait for nobody
        readers.append(reader)
        return reader._lanes[0]

    yield make
    while readers:
        readers.pop().close()


@dataclass
class Window:
    """A writer that keeps a window as text, and what else came of it."""

    cells: dict = field(default_factory=dict)
    runs: list = field(default_factory=list)
    failures: list = field(default_factory=list)
    ends: list = field(default_factory=list)

    def intern(self, layout):
        return layout

    def met(self, layout):
        pass

    def put_step(self, row, t, layout, leaves):
        assert row == 0
        assert t not in self.cells, "written twice"
        (self.cells[t],) = leaves

    def put_run(self, row, t, stop, layout, stream):
        column = [[None] for _ in range(stop)]
        taken = step_writer(layout, stop)(stream, t, stop, [column], row)
        for i in range(t, t + taken.written):
            self.put_step(row, i, layout, column[i])
        return taken

    def ended(self, row, t):
        assert row == 0
        self.ends.append(t)

    @property
    def text(self):
        return "".join(self.cells.get(t, ".") for t in range(max(self.cells, default=-1) + 1))


@dataclass
class OwnWindows(Window):
    """The same for windows that streams cut."""

    padded: int = 0

    def put_window(self, row, layout, leaves, count, padded):
        assert not self.cells, "written twice"
        (steps,) = leaves
        assert len(steps) == count
        self.cells, self.padded = dict(enumerate(steps)), padded


def fill(lane, step=0, start=0, stop=NEVER, window=None):
    """What a lane puts into a window."""
    window = Window() if window is None else window
    lane.fill(step, window, window.runs, window.failures, start, stop)
    return window


def texts_of(lane, windows):
    return [fill(lane, step).text for step in range(windows)]


def test_an_aligned_window_has_one_stream(lane_of):
    lane = lane_of("abcdef", "gh", "ijkl", windows="aligned")
    assert texts_of(lane, 5) == ["abcd", "ef", "gh", "ijkl", ""]
    assert lane.idle


def test_a_packed_window_goes_on_with_the_next_stream(lane_of):
    lane = lane_of("abcdef", "gh", "ijkl", windows="packed")
    assert texts_of(lane, 4) == ["abcd", "efgh", "ijkl", ""]


@pytest.mark.parametrize(
    ("windows", "expected"), [("aligned", ["ab", "cd", ""]), ("packed", ["abcd", ""])], ids=["aligned", "packed"]
)
def test_an_empty_stream_takes_no_step(lane_of, windows, expected):
    assert texts_of(lane_of("", "ab", "", "", "cd", "", windows=windows), len(expected)) == expected


def test_a_run_says_where_a_stream_was_read(lane_of):
    lane = lane_of("abcdef", "gh", windows="packed")
    fill(lane, step=0)
    first, second = fill(lane, step=1).runs
    assert (first.source, first.position, first.t, first.steps, first.fresh) == (0, 4, 0, 2, True)
    assert (second.source, second.position, second.t, second.steps, second.fresh) == (1, 0, 2, 2, True)


def test_a_window_may_be_read_in_two_goes(lane_of):
    lane = lane_of("abcdef", windows="aligned")
    window = fill(lane, stop=1)
    assert window.text == "a"
    assert fill(lane, start=1, window=window).text == "abcd"
    assert [(run.t, run.steps) for run in window.runs] == [(0, 1), (1, 3)]


@pytest.mark.parametrize(
    ("text", "ends", "ends_next"),
    [("a", [0], []), ("ab", [1], []), ("abcd", [], []), ("abcde", [], [0])],
    ids=["one", "two", "full", "more"],
)
def test_an_end_within_a_window_is_told_in_whichever_go_it_is_met(lane_of, text, ends, ends_next):
    lane = lane_of(text, mark_ends=True)
    window = fill(lane, stop=1)
    assert window.ends == []
    assert fill(lane, start=1, window=window).ends == ends
    before = lane.progress()
    assert lane.ends(1) == (text == "abcd")
    assert lane.progress() == before, "what is taken ahead is not counted"
    assert fill(lane, step=1).ends == ends_next


def test_what_follows_an_aligned_streams_end_is_not_pulled_in_the_second_go(lane_of):
    lane = lane_of("a", "bcd", windows="aligned")
    window = fill(lane, stop=1)
    assert fill(lane, start=1, window=window).text == "a"
    assert fill(lane, step=1).text == "bcd"


def test_a_broken_stream_is_raised_at_its_item(lane_of):
    lane = lane_of("abcde!", windows="aligned")
    fill(lane, step=0)
    with pytest.raises(ReadError, match="the disk is broken") as caught:
        fill(lane, step=1)
    assert (caught.value.source_index, caught.value.position, caught.value.lane) == (0, 5, 0)


@pytest.mark.parametrize(
    ("windows", "expected"),
    [("aligned", ["ab", "cdef", "g"]), ("packed", ["abcd", "efg", ""])],
    ids=["aligned", "packed"],
)
def test_a_skipped_stream_leaves_what_was_read_of_it(lane_of, windows, expected):
    lane = lane_of("ab!", "cdefg", windows=windows, on_error="skip")
    window = fill(lane, step=0)
    assert [(failure.source_index, failure.position) for failure in window.failures] == [(0, 2)]
    assert [window.text, *(fill(lane, step).text for step in (1, 2))] == expected


def test_the_next_stream_begins_in_the_window_of_one_that_broke_before_its_first_item(lane_of):
    lane = lane_of("!", "!", "ab", windows="aligned", on_error="skip")
    window = fill(lane)
    assert window.text == "ab"
    assert [failure.source_index for failure in window.failures] == [0, 1]


def test_a_lane_goes_on_in_the_middle_of_a_stream(lane_of):
    place = Snapshot(step=1, cursors=(1,), returned=(), lanes=(LaneState(grant=0, items=3, position=3),))
    lane = lane_of("abcdef", "gh", windows="packed", resume=place)
    window = fill(lane, step=1)
    assert window.text == "defg"
    assert [(run.source, run.position) for run in window.runs] == [(0, 3), (1, 0)]


def test_a_lane_that_was_idle_stays_idle(lane_of):
    place = Snapshot(step=1, cursors=(1,), returned=(), lanes=(LaneState(draws_without_item=1, idle=1),))
    lane = lane_of("abcdef", resume=place)
    assert lane.idle
    assert not lane.fresh


def test_a_lane_tells_how_far_it_has_read(lane_of):
    lane = lane_of("abcdef", "gh", windows="packed")
    fill(lane, step=0)
    assert lane.progress() == LaneState(grant=0, items=4, position=4).progress
    fill(lane, step=1)
    fill(lane, step=2)
    assert lane.progress() == LaneState(draws_without_item=lane.progress()[4], idle=1).progress


def test_data_reads_again_and_says_that_it_is_not_new(lane_of):
    lane = lane_of("ab", "c", windows="packed", padding_mode="data")
    window = fill(lane)
    assert window.text == "abca"
    assert [run.fresh for run in window.runs] == [True, True, False]
    assert not lane.fresh


def test_data_without_an_item_ends(lane_of):
    lane = lane_of("", "", windows="packed", padding_mode="data")
    assert fill(lane).text == ""
    assert lane.idle


def own_windows(text):
    """Lists of characters, as `text` is cut by spaces."""
    return (np.array([ord(character) for character in word], np.int64) for word in text.split(","))


def test_windows_that_a_stream_cuts_are_passed_on_whole(lane_of):
    lane = lane_of("abc,de", "f", time_steps=None, open_stream=own_windows)
    windows = [fill(lane, step, window=OwnWindows()) for step in range(3)]
    assert ["".join(map(chr, window.cells.values())) for window in windows] == ["abc", "de", "f"]
    assert [window.padded for window in windows] == [3, 3, 1], "a shorter last window is padded like the first"
    assert [(run.source, run.position, run.steps) for window in windows for run in window.runs] == [
        (0, 0, 3),
        (0, 3, 2),
        (1, 0, 1),
    ]


def test_a_window_of_no_steps_is_passed_over(lane_of):
    lane = lane_of(",ab", time_steps=None, open_stream=own_windows)
    window = fill(lane, window=OwnWindows())
    assert "".join(map(chr, window.cells.values())) == "ab"


@pytest.mark.parametrize(("promised", "has"), [(2, "at least 3"), (4, "only 3")])
def test_a_stream_must_have_the_length_that_was_promised(lane_of, promised, has):
    lane = lane_of("abc", lengths=[promised])
    with pytest.raises(LengthError, match=f"has {has} items"):
        fill(lane)
