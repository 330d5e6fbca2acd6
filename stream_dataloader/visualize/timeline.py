"""Which stream lies in which lane when: lanes down, time steps across.

::

    worker 0  lane 0  |aaaaaaaaaa····|cccc         a stream a letter, its first step in capitals in the text
              lane 1  |bbbb··········|dddddddd     padding is a dot
    worker 1  lane 2  |eeeeeeeeeeeeeeeeeeeee

Guarantee: made of `lengths` alone, it is what a loader with these lengths reads, bit for bit: the same code assigns
streams, and streams without data are counted.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from stream_dataloader._assembly.part import Run, have_data
from stream_dataloader._html.page import page, preformatted
from stream_dataloader._reading.lists import SourceList, SourceLists
from stream_dataloader._reading.plan import Reading, Start
from stream_dataloader._reading.reader import read_here
from stream_dataloader._schedule.rules import deal_members
from stream_dataloader.batch import StreamBatch
from stream_dataloader.dataloader import StreamDataLoader
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.visualize.assignment import Assignment, Segment
from stream_dataloader.visualize.figure import save_figure, svg_of
from stream_dataloader.visualize.text import draw_text

__all__ = ["Segment", "Timeline", "timeline"]

_MOST_STEPS = 100_000
_MOST_DRAWN = 500  # segments in a picture that a notebook keeps


@dataclass(frozen=True)
class Timeline(Assignment):
    """What each lane reads when. `print` shows it as text, notebooks as a picture.

    Attributes:
        segments: What lanes read, by lane and time; what lies between is padding.
        lanes: Number of lanes, B.
        steps: Number of batches.
        time_steps: Time steps of a batch, T; the longest window, where streams cut windows themselves.
        workers: The lanes of each worker.
    """

    def text(self, width: int = 100) -> str:
        """As text, for a terminal.

        Args:
            width: Of a line, in characters; at least 40.
        """
        return draw_text(self, width)

    def save(
        self, path: str | os.PathLike[str] | IO[bytes], *, theme: str = "light", sources: Sequence[Any] | None = None
    ) -> None:
        """Draw it with matplotlib: lanes down, steps across, one colour a stream, resets marked, padding grey.

        Args:
            path: A `.png`, `.svg` or `.pdf` file, or an open one, which gets a PNG.
            theme: `"light"` or `"dark"`.
            sources: Names streams by what their sources are, where there is room; None names their index.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: The theme is unknown.
        """
        save_figure(self, path, theme, sources)

    def __str__(self) -> str:
        return self.text()

    def _repr_svg_(self) -> str | None:
        """What a notebook shows: the picture, if matplotlib is installed and the picture is not too large."""
        return svg_of(self) if self._is_drawn() else None

    def _repr_html_(self) -> str | None:
        """What it shows otherwise: the text."""
        return None if self._is_drawn() else page(lambda: preformatted(self.text()), self.__repr__)

    def _is_drawn(self) -> bool:
        return len(self.segments) <= _MOST_DRAWN and importlib.util.find_spec("matplotlib") is not None


def timeline(
    what: StreamDataset | StreamDataLoader | Iterable[StreamBatch],
    *,
    steps: int | None = None,
    num_workers: int | None = None,
    epoch: int = 0,
) -> Timeline:
    """Which stream lies in which lane when.

    Args:
        what: A dataset or a loader with `lengths`: nothing is read. Or batches, such as a loader without `lengths`:
            they are read.
        steps: How many batches, at most; None: all of the epoch. Needed where there is no end (`"cycle"`).
        num_workers: Whose lanes are bracketed; None: as the loader or the batches have it, else one.
        epoch: Which epoch, where nothing is read.

    Raises:
        ValueError: There is no end, and `steps` is None.
        TypeError: It is none of these.

    Example:
        >>> from stream_dataloader import StreamDataset, visualize
        >>> dataset = StreamDataset(range(5), range, batch_size=2, time_steps=4, lengths=[5, 2, 9, 3, 4])
        >>> print(visualize.timeline(dataset).text(60))
        4 batches of 4 time steps, 2 lanes, 5 streams, padding 28.1%
                  0   1   2   3
        lane 0    Aaaaa···Ddd·Eeee
        lane 1    Bb··Ccccccccc···
    """
    if isinstance(what, StreamDataLoader):
        workers = what.num_workers if num_workers is None else num_workers
        if what.dataset.lengths is not None:
            return _of_lengths(what.dataset, steps, workers, epoch)
        return _of_batches(what, steps, workers)
    if isinstance(what, StreamDataset):
        if what.lengths is None:
            return _of_batches(StreamDataLoader(what), steps, num_workers)
        return _of_lengths(what, steps, num_workers or 0, epoch)
    if isinstance(what, Iterable):
        return _of_batches(what, steps, num_workers)
    raise TypeError(f"timeline() takes a dataset, a loader or batches, and this is a {type(what).__name__}")


class _Counted:
    """A stream of so many items without data."""

    def __init__(self, count: int, item: np.ndarray[Any, Any]) -> None:
        self._left, self._item = count, item

    def __iter__(self) -> Iterator[Any]:
        while self._left > 0:
            self._left -= 1
            yield self._item

    def read_into(self, out: Any) -> int:
        """Count some items; see `ReadsInto`."""
        count = min(len(out), self._left)
        self._left -= count
        return count


def _of_lengths(dataset: StreamDataset, steps: int | None, workers: int, epoch: int) -> Timeline:
    rules = dataset.rules
    if steps is None and rules.padding_mode == "cycle":
        raise ValueError('with padding_mode="cycle" an epoch has no end; give steps=, the number of batches to draw')
    plan = dataset.plan()
    assert plan.lists.lengths is not None
    lengths = plan.lists.lengths.tolist()
    if min(lengths, default=0) < 0:
        raise ValueError("the lengths of some sources are not known; give batches to draw what was read")
    item = np.zeros((1, 1) if rules.time_steps is None else 1, bool)

    def counted(source: int, *, start: int = 0) -> _Counted:
        return _Counted(lengths[source] - start, item)

    counting = SourceList(range(len(lengths)), counted, open_early=False, lengths=plan.lists.lengths)
    plan = dataclasses.replace(plan, lists=SourceLists([counting]), fill_value=0, retries=0, mark_ends=False)
    time_steps, runs = rules.time_steps or 1, []
    (begin,) = read_here(Reading.alone(plan, Start(epoch)))
    reader = begin()
    try:
        for part in reader:
            done = part.end or part.step >= (_MOST_STEPS if steps is None else steps)
            if done or not have_data([part], rules.padding_mode, rules.lanes):
                break
            if part.faults:
                raise part.faults[0].error.unpack()
            runs += [(part.step, run) for run in part.contents.runs]
    finally:
        reader.close()
    count = max((step for step, _ in runs), default=-1) + 1
    return _joined(runs, rules.lanes, count, time_steps, _workers(rules.lanes, workers))


def _of_batches(batches: Iterable[StreamBatch], steps: int | None, workers: int | None) -> Timeline:
    """What batches that were read hold."""
    seen: list[tuple[int, Run]] = []
    lanes, count, longest, owners = 0, 0, 1, np.zeros(0, np.int64)
    for step, batch in enumerate(itertools.islice(batches, _MOST_STEPS if steps is None else steps)):
        host = batch.host
        longest, lanes, count = max(longest, host.source.shape[0]), host.source.shape[1], step + 1
        owners = host.worker_id.numpy()
        seen += [(step, run) for run in _runs_of(host)]
    given = _ranges(owners) if workers is None else _workers(lanes, workers)
    return _joined(seen, lanes, count, longest, given)


def _runs_of(batch: StreamBatch) -> Iterator[Run]:
    """What the lanes read in one batch, as its fields say."""
    fields = (batch.source, batch.position, batch.mask, batch.is_start)
    source, position, mask, starts = (field.numpy() for field in fields)
    for lane in range(source.shape[1]):
        column = source[:, lane]
        edges = np.flatnonzero((np.diff(column) != 0) | starts[1:, lane]) + 1
        for begin, stop in zip([0, *edges.tolist()], [*edges.tolist(), len(column)], strict=True):
            if column[begin] >= 0:
                at = begin, lane
                first, fresh, start = int(position[at]), bool(mask[at]), bool(starts[at])
                yield Run(lane, begin, stop - begin, int(column[begin]), first, fresh, start)


def _joined(
    runs: Iterable[tuple[int, Run]], lanes: int, steps: int, time_steps: int, workers: tuple[range, ...]
) -> Timeline:
    """Runs of one stream that follow each other are one segment."""
    segments: list[Segment] = []
    for step, run in sorted(runs, key=lambda found: (found[1].lane, found[0], found[1].t)):
        begin = step * time_steps + run.t
        segment = Segment(run.lane, begin, begin + run.steps, run.source, run.position, run.starts, run.fresh)
        last = segments[-1] if segments else None
        if last is not None and _continues(segment, last):
            segments[-1] = last._replace(stop=segment.stop)
        else:
            segments.append(segment)
    return Timeline(tuple(segments), lanes, steps, time_steps, workers)


def _continues(segment: Segment, last: Segment) -> bool:
    same = segment.lane == last.lane and segment.source == last.source
    return same and segment.begin == last.stop and not segment.starts


def _workers(lanes: int, workers: int) -> tuple[range, ...]:
    """The lanes of each worker that has some."""
    return tuple(reader.lanes for reader in deal_members([lanes], [workers]))


def _ranges(owners: np.ndarray[Any, Any]) -> tuple[range, ...]:
    edges = np.flatnonzero(np.diff(owners)) + 1
    return tuple(range(int(a), int(b)) for a, b in zip([0, *edges], [*edges, len(owners)], strict=True))
