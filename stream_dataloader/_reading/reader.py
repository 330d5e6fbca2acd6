"""`PartReader`: drives the lanes of one worker, step after step, and yields a part a step.

Guarantees: every time is published before it is worked on, so no other worker waits longer than it must; a
worker that fails sends the error as a part of its step and no more; on `close`, every stream that was opened
is closed, and nobody waits for this worker any more.
"""

from __future__ import annotations

import functools
import operator
import re
import warnings
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing import current_process, parent_process
from typing import Any, Literal, NamedTuple

from stream_dataloader._assembly.part import Fault, Part, Run
from stream_dataloader._assembly.regroup import Regrouper
from stream_dataloader._assembly.writer import Gathered, PartWriter, SlotWriter
from stream_dataloader._reading.activity import Board
from stream_dataloader._reading.lane import Lane, LaneOptions
from stream_dataloader._reading.opener import Opener
from stream_dataloader._reading.sessions import SessionKey
from stream_dataloader._reading.source_queue import Abandoned, SourceQueue
from stream_dataloader._reading.stream import OpenedStream
from stream_dataloader._schedule.rules import NEVER, IntArray, Rules
from stream_dataloader._state.snapshot import LaneReports, Snapshot
from stream_dataloader.batch import SentBatch, StreamBatch
from stream_dataloader.errors import ErrorReport, ItemError, OpenError, StreamError, shorten
from stream_dataloader.protocols import StreamFactory
from stream_dataloader.stream_info import StreamInfo

_IS_FRESH = operator.attrgetter("fresh")
_NOTHING = Gathered(in_slot=False, time_steps=0, blocks=[], objects={})


class Recovery(NamedTuple):
    """What workers do differently after one of them died.

    Attributes:
        killers: Sources that killed their worker, and the time from which on they are not to be read; -1: nor opened.
        cautious: Open no source early, so that one that kills its worker is known for sure.
    """

    killers: Mapping[int, int]
    cautious: bool


NO_RECOVERY = Recovery({}, cautious=False)


class Setup(NamedTuple):
    """What a worker reads, and how; the options of a `StreamDataset`.

    Attributes:
        factory_of: What opens a source, by its index.
        board: Where to say what is being done.
        early: Whether a background thread may open a source ahead of need, by its index; None if none of them.
        recovery: What is different after a worker died.
        raw: Windows are wanted one by one: those that streams cut themselves as they are, others in one piece each.
    """

    rules: Rules
    sources: Sequence[Any]
    factory_of: Callable[[int], StreamFactory]
    lengths: IntArray | None
    fill_value: Any
    policy: Callable[[StreamError], Literal["raise", "skip"]]
    retries: int
    board: Board
    early: Callable[[int], bool] | None
    recovery: Recovery
    raw: bool


class PartReader:
    """Iterates over the parts of consecutive lanes.

    Args:
        setup: What is read.
        queue: Where sources come from.
        lanes: The lanes.
        worker_id: Whose they are.
        slots: The ring, if parts are to go there.
        resume: Where in the epoch to begin; None at its beginning.

    Attributes:
        setup: What is read.
        lanes: The lanes.
        worker_id: Whose they are.
        queue: Where sources come from; its `epoch` is the epoch read.
    """

    def __init__(
        self,
        setup: Setup,
        queue: SourceQueue,
        lanes: range,
        worker_id: int,
        slots: SlotWriter | None = None,
        resume: Snapshot | None = None,
    ) -> None:
        self.setup, self.queue, self.lanes, self.worker_id = setup, queue, lanes, worker_id
        early = None if setup.recovery.cautious else setup.early
        self._opener = Opener(queue, functools.partial(_open, setup, queue, worker_id), early)
        options = LaneOptions(
            setup.rules, setup.lengths, setup.raw, setup.policy, setup.board.reading, setup.recovery.killers
        )
        starts = [None if resume is None else resume.lanes[lane] for lane in lanes]
        self._taken: list[tuple[int, int]] = []
        self._lanes = [
            Lane(lane, row, self._opener, options, self._taken, starts[row]) for row, lane in enumerate(lanes)
        ]
        self._writer = PartWriter(len(lanes), setup.rules.time_steps, setup.fill_value, slots, by_lane=setup.raw)
        self._step = self._first_step = resume.step if resume else 0
        self._has_others = len(lanes) < setup.rules.lanes
        self._ended = False
        self._close = weakref.finalize(self, _close, self._opener, self._lanes, queue)

    def __iter__(self) -> Iterator[Part]:
        return self

    def __next__(self) -> Part:
        if self._ended:
            self.close()
            raise StopIteration
        step, self._step = self._step, self._step + 1
        runs: list[Run] = []
        gathered = _NOTHING
        failures: list[StreamError] = []
        faults: list[Fault] = []
        try:
            self._writer.begin(step)
            self._read(step, runs, failures, faults)
            gathered = self._writer.finish(runs)
            end = not runs and not faults
        except Abandoned:
            end = True
        except ValueError as error:  # fill_value
            faults.append(Fault(self.lanes.start, True, ErrorReport(error)))
            end = False
        told = self._tell(faults)
        if end or faults:
            self._ended = True
            self.queue.finish()
        return Part(
            self.worker_id,
            step,
            gathered.in_slot,
            gathered.time_steps,
            any(map(_IS_FRESH, runs)) or any(map(_IS_FRESH, faults)),
            self._lanes_read(runs, faults) if self.setup.rules.padding_mode == "drop" else 0,
            told,
            [] if gathered.in_slot else runs,
            gathered.blocks,
            gathered.objects,
            [ErrorReport(failure) for failure in failures],
            faults,
            end,
            gathered.layouts,
        )

    @staticmethod
    def _lanes_read(runs: list[Run], faults: list[Fault]) -> int:
        return len({run.lane for run in runs} | {fault.lane for fault in faults})

    def _tell(self, faults: list[Fault]) -> LaneReports:
        """What there is to know of the lanes after the step, to go on from there another time."""
        taken = tuple(self._taken)
        self._taken.clear()
        numbers: list[int] = []
        states: dict[int, Any] = {}
        for lane in self._lanes:
            numbers += lane.after()
            if lane.keeps_state:
                try:
                    states[lane.index] = lane.stream_state()
                except StreamError as error:
                    faults.append(Fault(lane.index, lane.fresh, ErrorReport(error)))
        return LaneReports(taken, array("q", numbers).tobytes(), states)

    def _read(self, step: int, runs: list[Run], failures: list[StreamError], faults: list[Fault]) -> None:
        """Fill this step's windows, those of lanes behind a broken one too: any other worker would.

        What comes next in logical time waits for what may still pull a source before it. An aligned window pulls
        none behind its first item, so where somebody waits, the first items of all lanes are read first::

            lane 0   1     5 6 7
            lane 1     2         8 9 .        lanes 2 and 3, of another worker, go on after 2, not after .
        """
        rules, first, behind = self.setup.rules, step * self.setup.rules.lanes, []
        parted = rules.windows == "aligned" and (rules.time_steps or 0) > 1 and self._has_others
        parted = parted and (step == self._first_step or self.queue.is_waited_for())
        for lane in self._lanes:
            self.queue.publish(first + lane.index)
            if lane.idle:
                continue
            before = len(runs)
            if self._fill(lane, step, (0, 1 if parted else NEVER), runs, failures, faults) and parted:
                behind.append(lane)
            if lane.idle:
                self.queue.end_busy(step + (len(runs) > before))
        if not any(map(_IS_FRESH, runs)):
            self.queue.end_fresh(step)
        self.queue.publish(first + rules.lanes + self.lanes.start)
        for lane in behind:
            self._fill(lane, step, (1, NEVER), runs, failures, faults)
        if behind:
            runs[:] = joined(runs)
            failures.sort(key=lambda failure: failure.lane)
            faults.sort(key=lambda fault: fault.lane)

    def _fill(
        self,
        lane: Lane,
        step: int,
        times: tuple[int, int],
        runs: list[Run],
        failures: list[StreamError],
        faults: list[Fault],
    ) -> bool:
        """Fill time steps `[start, stop)` of a lane's window; False if there is nothing more for it to read."""
        working, worker = self.setup.board.working, self.worker_id
        working[worker] = step * self.setup.rules.lanes + lane.index + 1
        try:
            lane.fill(step, self._writer, runs, failures, *times)
        except StreamError as error:
            faults.append(Fault(lane.index, lane.fresh, ErrorReport(error)))
            working[worker] = 0
            return False
        except Exception:
            working[worker] = 0
            raise
        except BaseException:  # sys.exit() in a stream: what was being done stays told
            board = self.setup.board
            board.exiting[worker] = board.exiting[worker] or board.reading[lane.index]
            raise
        working[worker] = 0
        return not lane.idle

    def close(self) -> None:
        """Close all streams and leave the session; no part follows."""
        self._ended = True
        self._close()


def joined(runs: Iterable[Run]) -> list[Run]:
    """Runs in lane order, those joined that go on with the same stream."""
    found: list[Run] = []
    for run in sorted(runs, key=lambda run: run.lane):
        last = found[-1] if found else None
        if (
            last is not None
            and last[:1] + last[3:4] == run[:1] + run[3:4]
            and last.position + last.steps == run.position
        ):
            found[-1] = last._replace(steps=last.steps + run.steps)
        else:
            found.append(run)
    return found


def _open(
    setup: Setup, queue: SourceQueue, worker_id: int, grant: int, lane: int, items: int, state: Any
) -> OpenedStream:
    index, epoch, repeat, fresh = queue.order[grant]
    info = StreamInfo(index, epoch, lane, worker_id, setup.rules.seed, repeat)
    opened = functools.partial(
        OpenedStream, info, fresh, factory=setup.factory_of(index), retries=setup.retries, grant=grant
    )
    try:
        stream: OpenedStream = opened(setup.sources[index])
    except Exception as error:
        stream = opened("?")
        failure = stream.error(OpenError, f"the source cannot be had: {shorten(error)}")
        failure.__cause__ = error
        stream.fail(failure)
        return stream
    if setup.recovery.killers.get(index) == -1:
        stream.items = items
        stream.fail(stream.error(OpenError, "its worker died twice over opening it"))
        return stream
    setup.board.opening[worker_id] = index + 1
    try:
        stream.open(items, state)
    except BaseException as error:
        if not isinstance(error, Exception):  # sys.exit() in the factory, or before the first item
            setup.board.exiting[worker_id] = -index - 1
        raise
    finally:
        setup.board.opening[worker_id] = 0
    return stream


def _close(opener: Opener, lanes: list[Lane], queue: SourceQueue) -> None:
    queue.leave()
    opener.close()
    for lane in lanes:
        lane.close()


def plain_session(worker_id: int, iteration: int) -> SessionKey:
    """Names the session of a worker of torch's own `DataLoader`, where no code of ours runs in the main process.

    A `DataLoader` starts its workers one after the other, so process ordinal minus worker id tells them from
    those of another.
    """
    ordinal = re.search(r"(\d+)$", current_process().name)
    parent = parent_process()
    return SessionKey(parent.pid or 0 if parent else 0, int(ordinal[1]) - worker_id if ordinal else 0, iteration)


class PlainParts:
    """The parts of one worker as `StreamBatch`es, up to the epoch's end: for torch's own `DataLoader`."""

    def __init__(self, reader: PartReader, *, sent: bool) -> None:
        self._reader, self._sent = reader, sent
        rules = reader.setup.rules
        self._decides_end = rules.padding_mode in ("data", "drop")
        self._regrouper = Regrouper(
            [reader.lanes], [reader.worker_id], rules.time_steps, reader.setup.fill_value, reader.setup.sources
        )

    def __iter__(self) -> Iterator[StreamBatch]:
        return self

    def __next__(self) -> StreamBatch:
        reader = self._reader
        part = next(reader)
        for failure in part.failures:
            warn_of_skip(failure.unpack())
        if part.faults:
            raise part.faults[0].error.unpack()
        if part.end or not self._delivers(part.step):
            reader.close()
            raise StopIteration
        batch = self._regrouper.batch(part.step, reader.queue.epoch, [part], None)
        if not self._sent:
            return batch
        try:
            return SentBatch.of(batch)
        except Exception as error:
            raise unsendable(part, error) from error

    def _delivers(self, step: int) -> bool:
        try:
            return not self._decides_end or self._reader.queue.delivers(step)
        except Abandoned:
            return False


def unsendable(part: Part, error: Exception) -> ItemError:
    """What to tell of an item that cannot be pickled."""
    return ItemError(
        f"step {part.step}, worker {part.worker_id}: an item cannot be pickled, which sending it to the main "
        f"process needs ({error}); yield arrays, numbers, strings or other plain objects",
        lane=part.runs[0].lane if part.runs else -1,
        worker_id=part.worker_id,
    )


def warn_of_skip(failure: Exception) -> None:
    """Tell the user that `on_error` skipped a stream."""
    warnings.warn(f"skipped the rest of a stream: {failure}", RuntimeWarning, stacklevel=3)
