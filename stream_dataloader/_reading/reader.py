"""`PartReader`: drives the lanes of one worker, step after step, and yields a part a step.

Guarantees: every time is published before it is worked on, so no other worker waits longer than it must; a
worker that fails sends the error as a part of its step and no more; on `close`, every stream that was opened
is closed, and nobody waits for this worker any more.
"""

from __future__ import annotations

import operator
import warnings
import weakref
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

from stream_dataloader._assembly.part import Fault, Part, Run
from stream_dataloader._assembly.writer import Gathered, PartWriter
from stream_dataloader._reading.lane import Lane
from stream_dataloader._reading.opener import Opener
from stream_dataloader._reading.plan import ReadingPlan
from stream_dataloader._reading.share import Share
from stream_dataloader._reading.source_queue import Abandoned, SourceQueue
from stream_dataloader._schedule.rules import NEVER
from stream_dataloader._state.snapshot import LaneReports
from stream_dataloader.errors import ErrorReport, ItemError, StreamError

_IS_FRESH = operator.attrgetter("fresh")
_NOTHING = Gathered(in_slot=False, time_steps=0, blocks=[], objects={})


class PartReader:
    """Iterates over the parts of consecutive lanes.

    Args:
        plan: What is read, and how.
        share: The worker's share of it.

    Attributes:
        plan: What is read, and how.
        share: The worker's share of it.
    """

    def __init__(self, plan: ReadingPlan, share: Share) -> None:
        self.plan = plan
        self.share = share
        self._queue = share.queue
        self._opener = Opener(plan, share)
        resume, lanes = share.resume, share.lanes
        starts = [None if resume is None else resume.lanes[lane] for lane in lanes]
        self._taken: list[tuple[int, int]] = []
        self._lanes = [
            Lane(lane, row, self._opener, plan, share, self._taken, starts[row]) for row, lane in enumerate(lanes)
        ]
        self._writer = PartWriter(
            len(lanes), plan.rules.time_steps, plan.fill_value, share.slots, by_lane=share.by_lane
        )
        self._step = self._first_step = resume.step if resume else 0
        self._has_others = len(lanes) < plan.rules.lanes
        self._ended = False
        self._close = weakref.finalize(self, _close, self._opener, self._lanes, share.queue)

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
            faults.append(Fault(self.share.lanes.start, True, ErrorReport(error)))
            end = False
        told = self._tell(faults)
        if end or faults:
            self._ended = True
            self._queue.finish()
        return Part(
            self.share.worker_id,
            step,
            gathered.in_slot,
            gathered.time_steps,
            any(map(_IS_FRESH, runs)) or any(map(_IS_FRESH, faults)),
            self._lanes_read(runs, faults) if self.plan.rules.padding_mode == "drop" else 0,
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
        rules, first, behind = self.plan.rules, step * self.plan.rules.lanes, []
        parted = rules.windows == "aligned" and (rules.time_steps or 0) > 1 and self._has_others
        parted = parted and (step == self._first_step or self._queue.is_waited_for())
        for lane in self._lanes:
            self._queue.publish(first + lane.index)
            if lane.idle:
                continue
            before = len(runs)
            if self._fill(lane, step, (0, 1 if parted else NEVER), runs, failures, faults) and parted:
                behind.append(lane)
            if lane.idle:
                self._queue.end_busy(step + (len(runs) > before))
        if not any(map(_IS_FRESH, runs)):
            self._queue.end_fresh(step)
        self._queue.publish(first + rules.lanes + self.share.lanes.start)
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
        working, worker = self.share.board.working, self.share.worker_id
        working[worker] = step * self.plan.rules.lanes + lane.index + 1
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
            board = self.share.board
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


def _close(opener: Opener, lanes: list[Lane], queue: SourceQueue) -> None:
    queue.leave()
    opener.close()
    for lane in lanes:
        lane.close()


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
