"""`PartReader`: drives the lanes of one worker, or of one of its threads, step after step, and yields a part a step.

Guarantees: every time is published before it is worked on, so no other worker waits longer than it must; a
worker that fails sends the error as a part of its step and no more; on `close`, every stream that was opened
is closed, and nobody waits for this worker any more.
"""

from __future__ import annotations

import atexit
import operator
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

from stream_dataloader._assembly.part import Contents, Fault, Part, Run
from stream_dataloader._assembly.slot_writer import SlotWriter
from stream_dataloader._assembly.writer import PartWriter
from stream_dataloader._memory.endings import WeakItems, in_thread, when_gone
from stream_dataloader._notices import warn
from stream_dataloader._reading.lane import Lane
from stream_dataloader._reading.meters import clock
from stream_dataloader._reading.opener import Opener
from stream_dataloader._reading.plan import Share
from stream_dataloader._reading.source_queue import Abandoned, SessionQueue
from stream_dataloader._schedule.rules import NEVER
from stream_dataloader._schedule.snapshot import LaneReports
from stream_dataloader.errors import ErrorReport, ItemError, StreamError

_IS_FRESH = operator.attrgetter("fresh")


class StepRecord:
    """What becomes of one step while lanes read it.

    Attributes:
        step: The step.
        runs: What lanes read.
        failures: Errors of streams that were skipped.
        faults: Errors that end the epoch.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.runs: list[Run] = []
        self.failures: list[StreamError] = []
        self.faults: list[Fault] = []

    @property
    def is_fresh(self) -> bool:
        """Something in it is read for the first time."""
        return any(map(_IS_FRESH, self.runs)) or any(map(_IS_FRESH, self.faults))

    @property
    def lanes_read(self) -> int:
        """How many lanes were not idle."""
        return len({run.lane for run in self.runs} | {fault.lane for fault in self.faults})

    def fail(self, lane: int, error: Exception, *, fresh: bool) -> None:
        """Note an error that ends the epoch."""
        self.faults.append(Fault(lane, fresh, ErrorReport(error)))

    def sort(self) -> None:
        """Bring all into lane order, after lanes were gone over twice."""
        self.runs = joined(self.runs)
        self.failures.sort(key=lambda failure: failure.lane)
        self.faults.sort(key=lambda fault: fault.lane)


class PartReader:
    """Iterates over the parts of consecutive lanes.

    Args:
        share: What is read here, and how.

    Attributes:
        share: The same.
        ended: No part follows.
    """

    def __init__(self, share: Share) -> None:
        reading = share.reading
        plan, lanes, resume = reading.plan, share.lanes, reading.resume
        self.share = share
        self._queue = share.queue
        self._session = share.queue if isinstance(share.queue, SessionQueue) else None  # None: nobody waits for it
        self._number = share.number
        self._board = reading.board
        self._working = reading.board.working.data  # several times faster to write a number to than the array
        self._meter = reading.meters.of(share.number)
        self._rules = plan.rules
        self._total = plan.rules.lanes
        self._first_lane = lanes.start
        self._drops = plan.rules.padding_mode == "drop"
        self._step = self._first_step = resume.step if resume else 0
        self._opener = Opener(share, self._meter)
        starts = [None if resume is None else resume.lanes[lane] for lane in lanes]
        self._lanes = [Lane(lane, row, share, self._opener, self._meter, starts[row]) for row, lane in enumerate(lanes)]
        self._writer = PartWriter(
            len(lanes),
            plan.rules.time_steps,
            plan.fill_value,
            None if reading.slots is None else SlotWriter(reading.slots, share.reader.lanes),
            whole_windows=reading.whole_windows,
            runs_ahead=not reading.locally,
        )
        self._marks_ends = reading.marks_ends
        self.ended = False
        if reading.locally:  # where Python code may not run when it goes: streams go by themselves, but for the thread
            _local.add(self)
            if self._opener.early is not None:
                when_gone(self, in_thread(self._opener.close))

    def __iter__(self) -> Iterator[Part]:
        return self

    def announce(self) -> None:
        """Publish where it begins: others need not wait until it is read from for the first time."""
        self._queue.publish(self._step * self._total + self._first_lane)

    def __next__(self) -> Part:
        if self.ended:
            self.close()
            raise StopIteration
        begin = clock()
        try:
            part = self._next_part()
        except Abandoned:  # nobody waits for it, or the main process will find out who is gone
            self.close()
            raise StopIteration from None
        in_slot = part.contents.in_slot or self.share.reading.locally
        self._meter.step(part.step, begin, part.items, in_slot=in_slot)
        return part

    def _next_part(self) -> Part:
        record = StepRecord(self._step)
        self._step += 1
        contents, end = Contents(runs=record.runs), False  # if the step is not finished
        try:
            self._writer.begin(record.step)
            self._read(record)
            contents = self._writer.finish(record.runs)
            end = not record.runs and not record.faults
        except ValueError as error:  # fill_value
            record.fail(self.share.reader.lanes.start, error, fresh=True)
        reports = self._reports_of(record)
        if end or record.faults:
            self.ended = True
            self._queue.finish()
        return Part(
            reader=self._number,
            step=record.step,
            fresh=record.is_fresh,
            items=sum([run.steps for run in record.runs]),
            lanes_read=record.lanes_read if self._drops else 0,
            reports=reports,
            contents=contents,
            failures=[ErrorReport(failure) for failure in record.failures],
            faults=record.faults,
            end=end,
        )

    def _reports_of(self, record: StepRecord) -> LaneReports:
        """What there is to know of the lanes after the step, to go on from there another time."""
        taken = tuple(self._opener.taken)
        self._opener.taken.clear()
        numbers: list[int] = []
        states: dict[int, Any] = {}
        for lane in self._lanes:
            numbers += lane.progress()
            if lane.keeps_state:
                try:
                    states[lane.index] = lane.stream_state()
                except StreamError as error:
                    record.fail(lane.batch_lane, error, fresh=lane.fresh)
        return LaneReports(taken, array("q", numbers).tobytes(), states)

    def _read(self, record: StepRecord) -> None:
        """Fill this step's windows, those of lanes behind a broken one too: any other worker would."""
        step, total, queue, session, runs = record.step, self._total, self._queue, self._session, record.runs
        first_items_first = self._reads_first_items_first(step)
        stop = 1 if first_items_first else NEVER
        behind: list[Lane] = []
        for lane in self._lanes:
            queue.publish(step * total + lane.index)
            if lane.idle:
                continue
            before = len(runs)
            if self._fill(lane, record, 0, stop) and first_items_first:
                behind.append(lane)
            if lane.idle and session is not None:
                session.end_busy(step + (len(runs) > before))
        if session is not None and not any(map(_IS_FRESH, runs)):
            session.end_fresh(step)
        queue.publish((step + 1) * total + self._first_lane)
        for lane in behind:
            self._fill(lane, record, 1, NEVER)
        if behind:
            record.sort()
        if self._marks_ends and not record.faults:
            self._mark_ends(record)

    def _mark_ends(self, record: StepRecord) -> None:
        """Mark the last steps of streams that end with their windows.

        It may wait for their next items, so it comes last: no other worker waits for it.
        """
        board, number, last = self._board, self._number, {run.lane: run for run in record.runs}
        for row, lane in enumerate(self._lanes):
            if (run := last.get(lane.batch_lane)) is None:
                continue
            time = (record.step + 1) * self._total + lane.index  # of what is taken ahead
            board.working[number] = time + 1
            try:
                if lane.ends(time):
                    self._writer.ended(row, run.t + run.steps - 1)
            except BaseException:  # as in `_fill`
                board.exiting[number] = board.exiting[number] or board.reading[lane.batch_lane]
                raise
        board.working[number] = 0

    def _reads_first_items_first(self, step: int) -> bool:
        """Whether the first items of all lanes are read before the rest of their windows.

        What comes next in logical time waits for what may still pull a source before it. An aligned window pulls
        none behind its first item, so this is done where somebody waits::

            lane 0   1     5 6 7
            lane 1     2         8 9 .        lanes 2 and 3, of another worker, go on after 2, not after .
        """
        rules = self._rules
        if rules.windows != "aligned" or (rules.time_steps or 0) <= 1 or self._session is None:
            return False
        return step == self._first_step or self._session.is_waited_for()

    def _fill(self, lane: Lane, record: StepRecord, start: int, stop: int) -> bool:
        """Fill time steps `[start, stop)` of a lane's window; False if there is nothing more for it to read."""
        working, number = self._working, self._number
        working[number] = record.step * self._total + lane.index + 1
        try:
            lane.fill(record.step, self._writer, record.runs, record.failures, start, stop)
        except StreamError as error:
            record.fail(lane.batch_lane, error, fresh=lane.fresh)
            working[number] = 0
            return False
        except Exception:
            working[number] = 0
            raise
        except BaseException:  # sys.exit() in a stream: what was being done stays told
            board = self._board
            board.exiting[number] = board.exiting[number] or board.reading[lane.batch_lane]
            raise
        working[number] = 0
        return not lane.idle

    def close(self) -> None:
        """Close all streams and leave the session; no part follows."""
        self.ended = True
        self._queue.leave()
        self._opener.close()
        for lane in self._lanes:
            lane.close()


_local: WeakItems[PartReader] = WeakItems()


@atexit.register
def _close_local() -> None:
    for reader in _local:
        reader.close()


def joined(runs: Iterable[Run]) -> list[Run]:
    """Runs in lane order, those joined that go on with the same stream."""
    found: list[Run] = []
    for run in sorted(runs, key=lambda run: run.lane):
        if found and run.continues(found[-1]):
            found[-1] = found[-1]._replace(steps=found[-1].steps + run.steps)
        else:
            found.append(run)
    return found


def unsendable(part: Part, worker_id: int, error: Exception) -> ItemError:
    """What to tell of an item that cannot be pickled."""
    return ItemError(
        f"step {part.step}, worker {worker_id}: an item cannot be pickled, which sending it to the main "
        f"process needs ({error}); yield arrays, numbers, strings or other plain objects",
        lane=part.contents.runs[0].lane if part.contents.runs else -1,
        worker_id=worker_id,
    )


def warn_of_skip(failure: Exception) -> None:
    """Tell the user that `on_error` skipped a stream."""
    text = f"skipped the rest of a stream: {failure}"
    warn(text, 3)
