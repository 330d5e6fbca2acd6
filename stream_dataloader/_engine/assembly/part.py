"""Messages from a worker to the main process: the runs of steps that lanes read, and the parts of steps they make.

Most runs are only passed on, so they stay plain numbers, one run after the other.

Guarantee: parts can be put together, and continued from, without asking the worker again.
"""

from __future__ import annotations

import itertools
import operator
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from stream_dataloader._engine.assembly.block import Block
from stream_dataloader._engine.items.bookkeeping import RUN_NUMBERS
from stream_dataloader._engine.items.layout import Layout
from stream_dataloader._engine.schedule.follower import LaneReports
from stream_dataloader._engine.schedule.rules import PaddingMode
from stream_dataloader.errors import ErrorReport, StreamError

IS_FRESH = operator.attrgetter("fresh")
MESSAGE_BYTES = 1 << 20  # the size up to which a message carries several parts


class Run(NamedTuple):
    """Consecutive steps of one stream in one lane's window.

    Attributes:
        lane: The lane.
        t: The first time step in the window.
        steps: Number of steps.
        source: Index of the stream's source.
        position: Index of the first step within its source.
        fresh: Whether the steps are read for the first time.
        starts: Whether the stream, or a sequence in it, starts with the first step.
        seed: The `stream_seed` of the steps, for random draws on a device.
    """

    lane: int
    t: int
    steps: int
    source: int
    position: int
    fresh: bool
    starts: bool
    seed: int

    def continues(self, last: Run) -> bool:
        """Return whether this run directly follows another of the same stream, in the same lane."""
        goes_on = self.position == last.position + last.steps and not self.starts
        return self.lane == last.lane and self.source == last.source and goes_on


assert len(Run._fields) == RUN_NUMBERS


def cut_run(run: Sequence[int], starts: Sequence[int]) -> list[int]:
    """Return the numbers of a run that is cut where sequences begin within it, by position, in order."""
    lane, t, steps, source, position, fresh, is_start, seed = run
    numbers: list[int] = []
    begin, stop = position, position + steps
    for start in starts:
        if start > begin:
            numbers += (lane, t + begin - position, start - begin, source, begin, fresh, is_start, seed)
        begin, is_start = start, True
    numbers += (lane, t + begin - position, stop - begin, source, begin, fresh, is_start, seed)
    return numbers


def runs_of(numbers: Iterable[int]) -> Iterator[Run]:
    """Return the runs that are given as plain numbers."""
    return map(Run._make, zip(*[iter(numbers)] * RUN_NUMBERS, strict=True))


class Fault(NamedTuple):
    """A stream's error that ends the epoch."""

    lane: int
    fresh: bool
    error: ErrorReport


class Contents(NamedTuple):
    """The windows that a worker's lanes read in one step, and their bookkeeping.

    Attributes:
        in_slot: Whether the arrays are in the step's slot.
        time_steps: Number of time steps of the blocks; 0 if there are none.
        runs: The runs that the lanes read, in lane order, as the numbers of `Run`s.
        blocks: Blocks that travel with the message; with `in_slot` only those of leaves that are objects.
        objects: Windows that are passed on, or their `WindowKind`s, by row.
        layouts: Layouts that were met for the first time, for the order of dicts' keys.
        ends: Rows and time steps of streams' last items.
    """

    in_slot: bool = False
    time_steps: int = 0
    runs: Sequence[int] = ()
    blocks: Sequence[Block] = ()
    objects: Mapping[int, Any] = {}
    layouts: Sequence[Layout] = ()
    ends: Sequence[tuple[int, int]] = ()


class Part(NamedTuple):
    """Contribution of one reader to one step.

    Attributes:
        reader: The reader's number, among the readers of all workers.
        step: The step.
        fresh: Whether some of its data is read for the first time.
        items: Number of time steps, without padding.
        lanes_read: Number of lanes that are not idle; counted with `"drop"` only.
        late: Number of time steps that stay padding because streams with new data had no item yet, at least 1 for each
            such stream; see `protocols.NOTHING_YET`.
        reports: Reports on the lanes, from which a saved state is made.
        contents: The windows.
        failures: Errors of streams that were skipped, or have a gap.
        faults: Errors that end the epoch; the reader sends no further part.
        end: Whether all of its lanes are idle; the reader sends no further part.
    """

    reader: int
    step: int
    fresh: bool
    items: int
    lanes_read: int
    late: int
    reports: LaneReports
    contents: Contents
    failures: Sequence[ErrorReport] = ()
    faults: Sequence[Fault] = ()
    end: bool = False


class PartDraft:
    """A part in the making; see `Contents` and `Part`."""

    def __init__(self, step: int, width: int) -> None:
        self.step = step
        self.runs: list[int] = []
        self.late: dict[int, int] = {}  # lanes whose streams had no item yet, with the steps that new data would fill
        self.failures: list[StreamError] = []
        self.faults: list[Fault] = []
        self.blocks: dict[int, Block] = {}  # by the id of an interned layout
        self.in_slot: Block | None = None  # the block that is in the step's slot
        self.latest: Block | None = None
        self.block_of_row: list[Block | None] = [None] * width  # the block of each row's window
        self.objects: dict[int, Any] = {}
        self.layouts: list[Layout] = []
        self.ends: list[tuple[int, int]] = []

    @property
    def lanes_read(self) -> int:
        """Number of lanes that were not idle."""
        return len({*self.runs[::RUN_NUMBERS], *self.late, *(fault.lane for fault in self.faults)})

    def fail(self, lane: int, error: Exception, *, fresh: bool) -> None:
        """Note an error that ends the epoch."""
        self.faults.append(Fault(lane, fresh, ErrorReport(error)))

    def sort(self) -> None:
        """Sort everything by lane, and join consecutive runs of the same stream."""
        found: list[Run] = []
        for run in sorted(runs_of(self.runs), key=lambda run: run.lane):
            if found and run.continues(found[-1]):
                found[-1] = found[-1]._replace(steps=found[-1].steps + run.steps)
            else:
                found.append(run)
        self.runs = list(itertools.chain.from_iterable(found))
        self.failures.sort(key=lambda failure: failure.lane)
        self.faults.sort(key=lambda fault: fault.lane)


def have_data(parts: Sequence[Part | None], padding_mode: PaddingMode, lanes: int) -> bool:
    """Return whether a step belongs to the epoch, given each reader's part; None for one that has ended."""
    is_fresh, lanes_read = False, 0
    for part in parts:
        if part is not None:
            is_fresh, lanes_read = is_fresh or part.fresh, lanes_read + part.lanes_read
    return is_fresh and (lanes_read == lanes or padding_mode != "drop")


def are_late(parts: Sequence[Part | None]) -> bool:
    """Return whether a step has no new data only because streams had no item yet."""
    found = False
    for part in parts:
        if part is not None:
            if part.fresh or part.faults:
                return False
            found = found or part.late > 0
    return found


def pack(parts: Sequence[Part]) -> list[Any]:
    """Pack parts of one worker for a message; most become plain tuples, which are pickled fast."""
    return list(map(_brief, parts))


def unpack(packed: Sequence[Any]) -> list[Part]:
    """Undo `pack`."""
    return [entry if type(entry) is Part else _whole(entry) for entry in packed]


def _brief(part: Part) -> Part | tuple[Any, ...]:
    """Return a part as a tuple of numbers, or the part itself if it has more content."""
    reader, step, fresh, items, lanes_read, late, reports, contents, failures, faults, end = part
    in_slot, time_steps, runs, blocks, objects, layouts, ends = contents
    taken, progress, streams = reports
    if not in_slot or blocks or objects or layouts or failures or faults or end or streams or late:
        return part
    brief = reader, step, fresh, items, lanes_read, taken, progress, time_steps, array("q", runs).tobytes()
    return (*brief, ends) if ends else brief


def _whole(brief: Sequence[Any]) -> Part:
    """Undo `_brief`."""
    reader, step, fresh, items, lanes_read, taken, progress, time_steps, runs, *ends = brief
    contents = Contents(in_slot=True, time_steps=time_steps, runs=array("q", runs), ends=ends[0] if ends else ())
    return Part(reader, step, fresh, items, lanes_read, 0, LaneReports(taken, progress, {}), contents)
