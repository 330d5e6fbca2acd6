"""`PartReader`: drives the lanes of one worker, or of one of its threads, and yields one part per step.

Guarantees: a worker that fails sends the error as a part of its step, and then nothing more. `close` closes every
stream that was opened, and ends the waits of others for this worker.
"""

from __future__ import annotations

import atexit
import itertools
from array import array
from collections.abc import Iterator
from typing import Any

from stream_dataloader._engine.assembly.part import IS_FRESH, Contents, Part, PartDraft
from stream_dataloader._engine.assembly.writer import PartWriter
from stream_dataloader._engine.items.bookkeeping import RUN_NUMBERS
from stream_dataloader._engine.memory.endings import WeakItems, in_thread, when_gone
from stream_dataloader._engine.notices import warn
from stream_dataloader._engine.reading.activity import BUSY_NS, ending_of
from stream_dataloader._engine.reading.context import Context
from stream_dataloader._engine.reading.global_draws import give_back
from stream_dataloader._engine.reading.lane import Lane
from stream_dataloader._engine.reading.opener import Opener
from stream_dataloader._engine.reading.plan import Reading
from stream_dataloader._engine.reading.source_queue import Abandoned, SourceQueue
from stream_dataloader._engine.reading.worker_info import worker_info_hidden
from stream_dataloader._engine.schedule.follower import LaneReports
from stream_dataloader._engine.schedule.rules import NEVER
from stream_dataloader.errors import ErrorReport, ItemError, StreamError
from stream_dataloader.stream_info import running


class PartReader:
    """Iterates over the parts of consecutive lanes.

    Attributes:
        ended: Whether no part follows.
        step: The step that is read next.
    """

    def __init__(self, reading: Reading, number: int, queue: SourceQueue) -> None:
        rules, place = reading.plan.rules, reading.place
        self.queue, self.reading = queue, reading
        self.ended = False
        self._number, self._token = number, next(_tokens)
        self._total = rules.lanes
        cuts_windows = rules.windows == "aligned" and (rules.time_steps or 0) > 1
        #: The queue if other readers may wait for this one's first items; None: windows are read in one go.
        self._shared_queue = queue if queue.is_shared and cuts_windows else None
        self._working = reading.status.working.data  # writing a number to it is several times faster than to the array
        self._meter = reading.meters.of(number)
        self.step = self._first_step = place.step
        self.opener = Opener(reading, number, queue, self._meter)
        self.reader = self.opener.reader
        self._writer = PartWriter(
            self.reader.lanes,
            reading.plan.window_steps,
            reading.plan.fill_value,
            reading.slots(reading.whole_windows),
            runs_ahead=not reading.locally,
        )
        starts = dict(enumerate(place.lanes))  # none at an epoch's beginning
        self._lanes = [
            Lane(lane, row, self.opener, self._writer, starts.get(lane)) for row, lane in enumerate(self.opener.lanes)
        ]
        self._context = Context(self.reader.lanes, reading.plan.context) if reading.plan.context else None
        self._read_again = 0  # items of context in the step
        self._span = reading.plan.context, reading.plan.window_steps or NEVER  # time steps that lanes read into
        # No Python code may run when the reader is collected; its streams are then collected by themselves. Only the
        # opener's thread must be ended. Streams that are still open when the program exits are closed by `_local`.
        if reading.locally:
            _local.add(self)
            if self.opener.opens_early:
                when_gone(self, in_thread(self.opener.close))

    def __iter__(self) -> Iterator[Part]:
        return self

    def __next__(self) -> Part:
        if self.ended:
            self.close()
            raise StopIteration
        begin = self._meter.begin(BUSY_NS)
        running.step = self._token, self.step
        try:
            with worker_info_hidden:
                part = self._next_part()
        except Abandoned:  # The session was closed, or another worker is gone; the main process finds out which.
            self.close()
            raise StopIteration from None
        finally:
            running.step = None
            if self.reading.plan.seed_globals:
                give_back()
        in_slot = part.contents.in_slot or self.reading.locally
        self._meter.step(part.step, begin, part.items, in_slot=in_slot)
        return part

    def _next_part(self) -> Part:
        draft = self._writer.begin(self.step)
        self.step += 1
        contents, end = Contents(runs=draft.runs), False  # stays so if the step cannot be finished
        try:
            self._read(draft)
            contents = self._writer.finish()
            end = not (draft.runs or draft.faults or draft.late)
        except ValueError as error:  # fill_value does not fit the items
            draft.fail(self.reader.lanes.start, error, fresh=True)
        reports = self._reports_of(draft)
        if end or draft.faults:
            self.ended = True
            self.queue.finish()
        items = sum(draft.runs[2::RUN_NUMBERS]) - self._read_again
        fresh = any(draft.runs[5::RUN_NUMBERS]) or any(map(IS_FRESH, draft.faults))
        lanes_read = draft.lanes_read if self.reading.plan.rules.padding_mode == "drop" else 0
        failures, late = list(map(ErrorReport, draft.failures)), sum(draft.late.values())
        how = fresh, items, lanes_read, late, reports, contents, failures, draft.faults, end
        return Part(self._number, draft.step, *how)

    def _reports_of(self, draft: PartDraft) -> LaneReports:
        taken = tuple([(lane, draw) for lane, draws in self.opener.taken.items() for draw in draws])
        self.opener.taken.clear()
        numbers: list[int] = []
        states: dict[int, Any] = {}
        for lane in self._lanes:  # see `LanePlace.progress`
            current = lane.current
            if current is None:
                numbers += (0, 0, 0, 0, lane.draws_without_item, lane.idle)
                continue
            stream = current.stream
            numbers += (1, stream.items, current.position, current.first_window, lane.draws_without_item, 0)
            if stream.keeps_state:
                try:
                    states[lane.index] = stream.state()
                except StreamError as error:
                    draft.fail(lane.index, error, fresh=lane.fresh)
        return LaneReports(taken, array("q", numbers).tobytes(), states)

    def _read(self, draft: PartDraft) -> None:
        """Fill this step's windows, also after a broken one, as the lanes of other workers would be filled, too."""
        queue, working, number, step = self.queue, self._working, self._number, draft.step
        shared = self._shared_queue
        first_items_first = shared is not None and self._reads_first_items_first(step, shared)
        begin, end = self._span
        stop = begin + 1 if first_items_first else end
        behind: list[Lane] = []
        first, closed = step * self._total, queue.closed
        lane = self._lanes[0]
        try:
            for lane in self._lanes:
                if closed is not None and closed():
                    raise Abandoned
                if not lane.idle:
                    time = first + lane.index
                    working[number] = time + 1
                    if lane.fill(time, begin, stop) and first_items_first:
                        behind.append(lane)
            queue.publish(first + self._total + self._lanes[0].index)
            for lane in behind:
                working[number] = first + lane.index + 1
                lane.fill(first + lane.index, begin + 1, end)
            if behind:
                draft.sort()
            if self._context is not None:
                self._read_again = self._context.write(draft, [lane.begun for lane in self._lanes])
            # This comes last in the step, because it may wait for the streams' next items.
            if self.reading.marks_ends and not draft.faults:
                for row, lane in enumerate(self._lanes):
                    if lane.filled:
                        time = first + self._total + lane.index  # an item that is taken ahead belongs to the next step
                        working[number] = time + 1
                        if lane.ends(time):
                            draft.ends.append((row, lane.filled - 1))
        except Exception:
            working[number] = 0
            raise
        except BaseException as error:
            # sys.exit() or the like in a stream ends the worker: note which source was being read.
            status = self.reading.status
            status.exiting[number] = status.exiting[number] or status.reading[lane.index]
            status.raised[number] = ending_of(error)
            raise
        working[number] = 0

    def _reads_first_items_first(self, step: int, queue: SourceQueue) -> bool:
        """Return whether the first items of all lanes are read before the rest of their windows.

        An aligned window takes no source after its first item. If another reader waits, the first items alone let it
        go on::

            lane 0   1     5 6 7
            lane 1     2         8 9 .        lanes 2 and 3, of another worker, go on after 2, not after .
        """
        return step == self._first_step or queue.is_waited_for()

    def close(self) -> None:
        """Close all streams and leave the session; no part follows."""
        self.ended = True
        self._meter.stop(BUSY_NS)
        self.queue.leave()  # before streams are closed, which may take long while other readers wait
        try:
            with worker_info_hidden:
                self.opener.close()
                for lane in self._lanes:
                    lane.close()
        finally:
            if self.reading.plan.seed_globals:
                give_back()


def read_here(reading: Reading) -> PartReader:
    """Read all lanes in this thread."""
    return PartReader(reading, 0, SourceQueue(reading.order(), reading.draws()))


_local: WeakItems[PartReader] = WeakItems()
_tokens = itertools.count()  # one for each reader of this process


@atexit.register
def _close_local() -> None:
    for reader in _local:
        reader.close()


def unsendable(part: Part, worker_id: int, error: Exception) -> ItemError:
    """Create the error for an item that cannot be pickled."""
    return ItemError(
        f"step {part.step}, worker {worker_id}: an item cannot be pickled, which sending it to the main "
        f"process needs ({error}); yield arrays, numbers, strings or other plain objects",
        lane=part.contents.runs[0] if part.contents.runs else -1,
        worker_id=worker_id,
    )


def warn_of_skip(failure: Exception) -> None:
    """Tell the user that `on_error` skipped a stream."""
    text = f"skipped the rest of a stream: {failure}"
    warn(text, 3)
