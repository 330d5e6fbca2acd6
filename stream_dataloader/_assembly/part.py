"""What passes from a worker to the main process: the runs of steps that lanes read, and the part of a step they make.

Most runs are only passed on, so they stay numbers, one run after the other.

Guarantee: parts can be put together, and gone on from, without asking the worker again.
"""

from __future__ import annotations

import itertools
import operator
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from stream_dataloader._assembly.block import Block
from stream_dataloader._items.layout import Layout
from stream_dataloader._schedule.snapshot import LaneReports
from stream_dataloader.errors import ErrorReport, StreamError
from stream_dataloader.protocols import PaddingMode

IS_FRESH = operator.attrgetter("fresh")
MESSAGE_BYTES = 1 << 20  # a message carries several parts only up to so much


class Run(NamedTuple):
    """Consecutive steps of one stream in one lane's window."""

    lane: int
    t: int  # the first time step in the window
    steps: int  # how many there are
    source: int  # index of the stream's source
    position: int  # index of the first step within its source
    fresh: bool  # they are read for the first time
    starts: bool  # the stream, or a sequence in it, starts with the first step
    seed: int  # of this reading of the source, for draws on a device

    def continues(self, last: Run) -> bool:
        """Whether this is what comes next of the same stream, in the same lane."""
        goes_on = self.position == last.position + last.steps and not self.starts
        return self.lane == last.lane and self.source == last.source and goes_on

    def cut(self, starts: Sequence[int]) -> Iterator[Run]:
        """This run, cut where sequences begin within it, by position."""
        within = [start for start in starts if start > self.position]
        bounds = [self.position, *within, self.position + self.steps]
        for begin, stop in itertools.pairwise(bounds):
            yield self._replace(
                t=self.t + begin - self.position,
                steps=stop - begin,
                position=begin,
                starts=self.starts or begin in starts,
            )


#: How many numbers a run has.
RUN_NUMBERS = len(Run._fields)


def runs_of(numbers: Iterable[int]) -> Iterator[Run]:
    """The runs that numbers stand for."""
    return map(Run._make, zip(*[iter(numbers)] * RUN_NUMBERS, strict=True))


class Fault(NamedTuple):
    """A stream's error that ends the epoch."""

    lane: int
    fresh: bool
    error: ErrorReport


class Contents(NamedTuple):
    """The windows that a worker's lanes read in one step, and their bookkeeping."""

    in_slot: bool = False  # the arrays are in the step's slot
    time_steps: int = 0  # of the blocks; 0 if there are none
    runs: Sequence[int] = ()  # what the lanes read, in lane order: the numbers of `Run`s
    blocks: Sequence[Block] = ()  # of those in the slot only leaves that are objects
    objects: Mapping[int, Any] = {}  # windows passed on, or `WindowKind`s, by row
    layouts: Sequence[Layout] = ()  # met for the first time, for the order of dicts' keys
    ends: Sequence[tuple[int, int]] = ()  # rows and time steps of streams' last items


class Part(NamedTuple):
    """What one reader contributes to one step."""

    reader: int  # its number, among the readers of all workers
    step: int
    fresh: bool  # something in it is read for the first time
    items: int  # how many time steps it has, padding left out
    lanes_read: int  # how many lanes are not idle; with `"drop"` only
    reports: LaneReports  # what there is to know to go on from here another time
    contents: Contents
    failures: Sequence[ErrorReport] = ()  # of streams that were skipped, or have a gap
    faults: Sequence[Fault] = ()  # of others; the reader sends no further part
    end: bool = False  # all of its lanes are idle; it sends no further part


class PartDraft:
    """A part in the making; see `Contents` and `Part`."""

    def __init__(self, step: int, width: int) -> None:
        self.step = step
        self.runs: list[int] = []
        self.failures: list[StreamError] = []
        self.faults: list[Fault] = []
        self.blocks: dict[int, Block] = {}  # by the id of an interned layout
        self.in_slot: Block | None = None  # the one that is in the step's slot
        self.latest: Block | None = None
        self.block_of_row: list[Block | None] = [None] * width  # that a row's window goes to
        self.objects: dict[int, Any] = {}
        self.layouts: list[Layout] = []
        self.ends: list[tuple[int, int]] = []

    @property
    def lanes_read(self) -> int:
        """How many lanes were not idle."""
        return len({*self.runs[::RUN_NUMBERS], *(fault.lane for fault in self.faults)})

    def fail(self, lane: int, error: Exception, *, fresh: bool) -> None:
        """Note an error that ends the epoch."""
        self.faults.append(Fault(lane, fresh, ErrorReport(error)))

    def sort(self) -> None:
        """Bring all into lane order, and join runs that go on with a stream."""
        found: list[Run] = []
        for run in sorted(runs_of(self.runs), key=lambda run: run.lane):
            if found and run.continues(found[-1]):
                found[-1] = found[-1]._replace(steps=found[-1].steps + run.steps)
            else:
                found.append(run)
        self.runs = list(itertools.chain.from_iterable(found))
        self.failures.sort(key=lambda failure: failure.lane)
        self.faults.sort(key=lambda fault: fault.lane)


def have_data(parts: Sequence[Part | None], padding_mode: PaddingMode, lanes: int, late: int = 0) -> bool:
    """Whether a step belongs to the epoch, by all readers' parts; None for one that has ended or is late."""
    is_fresh, lanes_read = late > 0, late
    for part in parts:
        if part is not None:
            is_fresh, lanes_read = is_fresh or part.fresh, lanes_read + part.lanes_read
    return lanes_read == lanes if padding_mode == "drop" else is_fresh


def pack(parts: Sequence[Part]) -> list[Any]:
    """Parts of one worker for a message; most become plain tuples."""
    return list(map(_brief, parts))


def unpack(packed: Sequence[Any]) -> list[Part]:
    """What `pack` was given."""
    return [entry if type(entry) is Part else _whole(entry) for entry in packed]


def _brief(part: Part) -> Part | tuple[Any, ...]:
    """A part as its few numbers; itself if there is more to it."""
    reader, step, fresh, items, lanes_read, reports, contents, failures, faults, end = part
    in_slot, time_steps, runs, blocks, objects, layouts, ends = contents
    taken, progress, streams = reports
    if not in_slot or blocks or objects or layouts or failures or faults or end or streams:
        return part
    brief = reader, step, fresh, items, lanes_read, taken, progress, time_steps, array("q", runs).tobytes()
    return (*brief, ends) if ends else brief


def _whole(brief: Sequence[Any]) -> Part:
    """The part that `_brief` was given."""
    reader, step, fresh, items, lanes_read, taken, progress, time_steps, runs, *ends = brief
    contents = Contents(in_slot=True, time_steps=time_steps, runs=array("q", runs), ends=ends[0] if ends else ())
    return Part(reader, step, fresh, items, lanes_read, LaneReports(taken, progress, {}), contents)
