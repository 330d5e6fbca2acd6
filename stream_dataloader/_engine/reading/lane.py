"""One row of the batch: reads one stream after another.

::

    aligned, T = 4   | a a a a | a a . . | b b b . |      a stream starts at t = 0, the rest is padding
    packed,  T = 4   | a a a a | a a b b | b c c c |      the next stream starts on the very next step

Guarantee: every item of a stream is written once, in order, with no other stream between.
"""

from __future__ import annotations

from stream_dataloader._engine.assembly.part import cut_run
from stream_dataloader._engine.assembly.writer import PartWriter
from stream_dataloader._engine.reading.opener import Opener
from stream_dataloader._engine.reading.stream import OpenedStream
from stream_dataloader._engine.reading.windows import StreamWindows
from stream_dataloader._engine.schedule.place import LanePlace
from stream_dataloader._engine.schedule.rules import NEVER
from stream_dataloader.errors import ItemError, ReadError, StreamError
from stream_dataloader.stream_info import running


class Lane:
    """Reads streams into one row.

    Attributes:
        current: The stream that is open.
        draws_without_item: Sources that it took since it read an item.
        idle: Whether no source is left for it; an idle lane stays idle.
        fresh: Whether it reads, or may still read, new data.
        begun: Time steps of the latest window at which it took another stream.
        filled: The time step behind the last item of the latest window; 0 if it has none.
    """

    def __init__(
        self, index: int, row: int, opener: Opener, writer: PartWriter, start: LanePlace | None = None
    ) -> None:
        reading = opener.reading
        self.index = index
        self._row = row
        self._reading = reading
        self._killers = reading.recovery.killers
        self._rules = reading.plan.rules
        self._is_packed = self._rules.windows == "packed"
        self._opener = opener
        self._writer = writer
        self._read = StreamWindows.read_steps
        if self._rules.time_steps is None:
            self._read = StreamWindows.pass_window if reading.whole_windows else StreamWindows.read_window
        self.current: StreamWindows | None = None
        self.draws_without_item = 0
        self.idle = False
        self.fresh = True
        self._first = reading.plan.context
        self.begun: list[int] = []
        self.filled = 0
        self._start = start
        if start is not None:
            self.idle, self.fresh = bool(start.idle), not start.idle
            self.draws_without_item = start.draws_without_item

    def fill(self, time: int, t: int, stop: int) -> bool:
        """Read time steps `[t, stop)` of a window, behind its context, or one window of a stream that cuts its own.

        Return False if there is nothing more for this lane to read in this window. A broken stream is noted in the
        step's draft, as skipped or as a fault.
        """
        draft, first = self._writer.draft, self._first
        if t == first:
            self.begun, self.filled = [], 0
        try:
            # With aligned windows a stream begins only where a window does: the cells behind an end stay padding.
            while t <= first or self.current is not None or self._is_packed:
                current = self.current or self._next(time, t)
                if current is None:
                    return False
                if current.behind:
                    t, current.behind = t - current.behind, 0
                stream, position, full, error = current.stream, current.position, False, None
                before, running.info = running.info, stream.info  # `enter` and `leave`, without their calls
                if stream.draws is not None:
                    stream.draws.enter()
                try:
                    # A source at which workers died again and again would end the next one, too. From that time on
                    # it is refused before it is read.
                    if self._killers:
                        self._spare_worker(stream, time)
                    full = self._read(current, t, stop)
                    if current.waits:
                        self._check_waiting(stream)
                except StreamError as broken:
                    full, error = False, broken
                finally:
                    running.info = before
                if stream.gaps:
                    draft.failures += stream.gaps
                    stream.gaps = ()
                if count := current.position - position:
                    source, starts = stream.info.source_index, position == current.begin
                    run = (self.index, t, count, source, position, stream.fresh, starts, stream.seed)
                    if stream.marks and self._rules.time_steps is not None:
                        draft.runs += cut_run(run, stream.starts())
                    else:
                        draft.runs += run
                    t = self.filled = t + count
                    self.draws_without_item = 0
                    if current.new_layout is not None:
                        self._writer.note_layout(current.new_layout)
                        current.new_layout = None
                if full:
                    if current.waits:
                        left = max((self._reading.plan.window_steps or 0) - t, 1)
                        draft.late[self.index] = left if stream.fresh else 0
                    return not current.waits
                if error is not None:
                    if error is current.between or not self._reading.plan.skips(error):
                        raise error
                    draft.failures.append(error)
                t = max(t, first)
                if self._reading.marks_ends and t > first and current.has_ended(error):
                    draft.ends.append((self._row, t - 1))
                self.close()
        except StreamError as error:
            # The error travels in this step's part, so that all earlier batches are delivered before it is raised.
            draft.fail(self.index, error, fresh=self.fresh)
            return False
        return True

    def ends(self, time: int) -> bool:
        """Return whether its stream ends with the window that it filled."""
        if self.current is None:
            return False
        # To look at the next item would read it, and this source kills its worker from that time on.
        if self._killers.get(self.current.stream.info.source_index, NEVER) <= time:
            return False
        return self.current.ends()

    def _spare_worker(self, stream: OpenedStream, time: int) -> None:
        fatal = self._killers.get(stream.info.source_index)
        if fatal is not None and time >= fatal:
            raise stream.error(ReadError, "workers died again and again while they read it here")

    def _check_waiting(self, stream: OpenedStream) -> None:
        if (why := self._reading.why_none_waits) is not None:
            raise stream.error(ItemError, f"the stream yielded NOTHING_YET, and {why}")

    def _next(self, time: int, t: int) -> StreamWindows | None:
        """Take the next source at time step `t` of a window; None if no source is left for this lane, now or later."""
        if self._start is not None:
            self._resume(self._start)
            if self.current is not None:
                return self.current
        rules, draws, stream = self._rules, self.draws_without_item, None
        if not draws or not rules.gives_up(self.index, draws):
            stream = self._opener.next(self.index, time)
        self.draws_without_item += 1
        self.idle, self.fresh = stream is None, stream is not None and stream.fresh
        if stream is not None:
            self.current = StreamWindows(stream, self._writer, self._row, rules.time_steps)
            self.current.begin = self.current.position
            self.begun.append(t)
        return self.current

    def _resume(self, start: LanePlace) -> None:
        self._start, stream = None, self._opener.resume(self.index, start)
        if stream is not None:
            self.fresh = stream.fresh
            self.current = StreamWindows(stream, self._writer, self._row, self._rules.time_steps)
            self.current.behind = start.position - self.current.position

    def close(self) -> None:
        """Close the stream that is open."""
        if self.current is not None:
            self._opener.close_stream(self.index, self.current.stream)
            self.current = None
