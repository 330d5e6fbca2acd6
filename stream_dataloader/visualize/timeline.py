"""Which stream lies in which lane when: lanes down, time steps across.

::

    worker 0  lane 0  |aaaaaaaaaa····|cccc         a letter a stream
              lane 1  |bbbb··········|dddddddd     padding is a dot
    worker 1  lane 2  |eeeeeeeeeeeeeeeeeeeee

Guarantee: made of `lengths` alone, it is what a loader with these lengths reads, bit for bit: the same code assigns
streams, and streams without data are counted.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from stream_dataloader._assembly.part import Run, have_data
from stream_dataloader._html.batch import runs_of
from stream_dataloader._reading.lists import SourceList, SourceLists
from stream_dataloader._reading.plan import Reading, Start
from stream_dataloader._reading.reader import read_here
from stream_dataloader._schedule.rules import deal_members
from stream_dataloader.batch import StreamBatch
from stream_dataloader.dataloader import StreamDataLoader
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.visualize.picture import Segment, Timeline

__all__ = ["timeline"]

_MOST_STEPS = 100_000


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
        steps: How many batches, at most; needed where there is no end (`"cycle"`).
        num_workers: Whose lanes are named; None: as the loader or the batches have it.
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
        padding would be 4% with windows="packed"
    """
    dataset = what.dataset if isinstance(what, StreamDataLoader) else what
    if isinstance(what, StreamDataLoader) and num_workers is None:
        num_workers = what.num_workers
    if isinstance(dataset, StreamDataset) and dataset.lengths is not None:
        return _of_lengths(dataset, steps, num_workers or 0, epoch)
    if isinstance(what, StreamDataset):
        what = StreamDataLoader(what)
    return _of_batches(what, steps, num_workers)


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
    drawn = _joined(runs, rules.lanes, count, time_steps, _workers(rules.lanes, workers))
    outlook = dataset.plan().outlook(epoch)
    return dataclasses.replace(drawn, alternatives=() if outlook is None else tuple(outlook.alternatives))


def _of_batches(batches: Iterable[StreamBatch], steps: int | None, workers: int | None) -> Timeline:
    """What batches that were read hold."""
    runs: list[tuple[int, Run]] = []
    lanes, count, longest, owners = 0, 0, 1, np.zeros(0, np.int64)
    most = _MOST_STEPS if steps is None else steps
    for step, batch in enumerate(itertools.islice(batches, most)):
        host = batch.host
        time_steps, lanes = host.source.shape
        longest = max(longest, time_steps)
        count = step + 1
        owners = host.worker_id.numpy()
        source = host.source.numpy()
        position = host.position.numpy()
        mask = host.mask.numpy()
        starts = host.is_start.numpy()
        for lane in range(lanes):
            for begin, stop in runs_of(source[:, lane], starts[:, lane]):
                at = begin, lane
                index, first = int(source[at]), int(position[at])
                fresh, start = bool(mask[at]), bool(starts[at])
                runs.append((step, Run(lane, begin, stop - begin, index, first, fresh, start)))
    edges = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), lanes]
    given = tuple(itertools.starmap(range, itertools.pairwise(edges)))
    if workers is not None:
        given = _workers(lanes, workers)
    return _joined(runs, lanes, count, longest, given)


def _joined(
    runs: list[tuple[int, Run]],
    lanes: int,
    steps: int,
    time_steps: int,
    workers: tuple[range, ...],
) -> Timeline:
    """Runs of one stream that follow each other are one segment."""
    segments: list[Segment] = []
    for step, run in sorted(runs, key=lambda found: (found[1].lane, found[0], found[1].t)):
        begin = step * time_steps + run.t
        last = segments[-1] if segments else None
        here = run.lane, run.source, begin
        if last and (last.lane, last.source, last.stop) == here and not run.starts:
            segments[-1] = last._replace(stop=begin + run.steps)
        else:
            fields = run.source, run.position, run.starts, run.fresh
            segments.append(Segment(run.lane, begin, begin + run.steps, *fields))
    return Timeline(tuple(segments), lanes, steps, time_steps, workers)


def _workers(lanes: int, workers: int) -> tuple[range, ...]:
    """The lanes of each worker that has some."""
    return tuple(reader.lanes for reader in deal_members([lanes], [workers]))
