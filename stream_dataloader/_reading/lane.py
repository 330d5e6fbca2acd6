"""One row of the batch: reads one stream after another and cuts it into windows.

::

    aligned, T = 4   | a a a a | a a . . | b b b . |      a stream starts at t = 0, the rest is padding
    packed,  T = 4   | a a a a | a a b b | b c c c |      the next stream starts on the very next step

Guarantee: every item of a stream goes to the sink once, in order, with no other stream between; a lane out
of data takes the next source at once, within the same window if it may.
"""

from __future__ import annotations

import functools
from typing import Any

from stream_dataloader._assembly.part import Run
from stream_dataloader._assembly.writer import PartWriter
from stream_dataloader._items.layout import Layout, Leaves
from stream_dataloader._items.structure import ALIKE, LEAF, Misfit, StreamMisfit
from stream_dataloader._reading.foresight import goes_on
from stream_dataloader._reading.meters import Meter
from stream_dataloader._reading.opener import Opener
from stream_dataloader._reading.plan import Share
from stream_dataloader._reading.stream import END, OpenedStream
from stream_dataloader._schedule.rules import NEVER
from stream_dataloader._schedule.snapshot import LaneState
from stream_dataloader.errors import EmptySourcesError, ItemError, ReadError, StreamError
from stream_dataloader.stream_info import run_as


class Lane:
    """Reads streams into one row.

    Args:
        index: The lane's number, as the schedule has it.
        row: Its row among the worker's lanes.
        share: The share of the worker whose lane it is.
        opener: Opens the sources it is granted.
        meter: Where to count what is done.
        start: Where it begins; None at the epoch's beginning.

    Attributes:
        batch_lane: Its number, as the batch has it.
        keeps_state: The open stream has a state that it needs to be opened again.
        idle: No source is left for it; it stays idle.
        fresh: It reads, or may yet read, something new.
    """

    def __init__(
        self,
        index: int,
        row: int,
        share: Share,
        opener: Opener,
        meter: Meter,
        start: LaneState | None = None,
    ) -> None:
        reading = share.reading
        plan = reading.plan
        self.index = index
        self.batch_lane = share.reader.lanes[row]
        self._row = row
        self._opener = opener
        self._plan = plan
        self._rules = plan.rules
        self._marks_ends = reading.marks_ends
        self._by_lane = reading.whole_windows
        self._meter = meter
        self._killers = reading.killers
        self._reading = reading.board.reading  # for each lane, one more than the source that is open
        # not bound: a lane that holds itself, and its stream, would wait for the garbage collector
        self._read = Lane._read_window if plan.rules.time_steps is None else Lane._read_steps
        self._stream: OpenedStream | None = None
        self._layout: Layout | None = None  # of the stream's first item
        self._unmet: Layout | None = None  # the same, if the sink was not told of it yet
        self._between: StreamError | None = None  # an error that is about two streams
        self._first_window = 0  # steps of the stream's first window
        self._position = 0  # time steps read of the stream
        self._draws_without_item = 0
        self.idle = False
        self.fresh = True
        self.keeps_state = False
        self._start = start
        if start is not None:
            self.idle, self.fresh = bool(start.idle), not start.idle
            self._draws_without_item = start.draws_without_item
            opener.restore(index, start.reserved)

    def progress(self) -> tuple[int, ...]:
        """How far it has read: see `LaneState.progress`."""
        stream = self._stream
        if stream is None:
            return 0, 0, 0, 0, self._draws_without_item, self.idle
        return 1, stream.items, self._position, self._first_window, self._draws_without_item, 0

    def stream_state(self) -> Any:
        """The open stream's own state."""
        return None if self._stream is None else self._stream.state()

    def fill(
        self,
        step: int,
        sink: PartWriter,
        runs: list[Run],
        failures: list[StreamError],
        start: int = 0,
        stop: int = NEVER,
    ) -> None:
        """Read one window into the sink, or time steps `[start, stop)` of it; nothing, once no source is left.

        Args:
            runs: What was read is added here.
            failures: Errors of streams that were skipped are added here.

        Raises:
            StreamError: A stream is broken, and the policy is to raise.
        """
        rules, t, full = self._rules, start, False
        while not full and (t == 0 or self._stream is not None or rules.windows == "packed"):
            if self._start is not None:
                self._stream = self._resumed_stream(self._start)
            stream = self._stream or self._next_stream(step * rules.lanes + self.index)
            if stream is None:
                return
            position, error = self._position, None
            before = run_as(stream.info)
            try:
                if self._killers:
                    self._spare_worker(stream, step * rules.lanes + self.index)
                full = self._read(self, stream, sink, t, stop)
            except StreamError as broken:
                error = broken
            finally:
                run_as(before)
            self.keeps_state = stream.keeps_state
            if count := self._position - position:
                starts = position == stream.begin
                runs.append(Run(self.batch_lane, t, count, stream.info.source_index, position, stream.fresh, starts))
                t += count
                self._draws_without_item = 0
                if self._unmet is not None:
                    sink.met(self._unmet)
                    self._unmet = None
            if error is not None:
                if error is self._between or not self._plan.skips(error):
                    raise error
                failures.append(error)
            if not full:
                if self._marks_ends and t > 0 and self._has_ended(stream, error):
                    sink.ended(self._row, t - 1)
                self._close_stream()

    def ends(self, time: int) -> bool:
        """Whether its stream ends with the window that it filled; see `foresight`.

        Args:
            time: When it is to read on.
        """
        stream, layout = self._stream, self._layout
        if not self._marks_ends or stream is None or layout is None:
            return False
        if self._killers.get(stream.info.source_index, NEVER) <= time:  # it is not to be read then, nor before
            return False
        stop = self._known_stop(stream)
        return not goes_on(stream, layout) if stop is None else self._position == stop

    def _has_ended(self, stream: OpenedStream, error: StreamError | None) -> bool:
        """Whether a stream that it leaves, for its end or an error, had its last time step."""
        return self._position > stream.begin and (error is None or self._position == self._known_stop(stream))

    def _known_stop(self, stream: OpenedStream) -> int | None:
        """The time step behind a stream's last. Of streams that cut windows only the number of these is known."""
        return None if self._rules.time_steps is None else stream.stop

    def _spare_worker(self, stream: OpenedStream, time: int) -> None:
        fatal = self._killers.get(stream.info.source_index)
        if fatal is not None and time >= fatal:
            raise stream.error(ReadError, "workers died again and again while they read it here")

    def _read_steps(self, stream: OpenedStream, sink: PartWriter, t: int, stop: int) -> bool:
        """Read single steps up to `stop`; False if the stream ended before."""
        assert self._rules.time_steps is not None
        end, at_once = min(self._rules.time_steps, stop), True
        while t < end:
            known = None if stream.has_item else self._layout
            if known is not None and stream.writes and None not in known.dtypes:
                count = self._write_steps(stream, sink, t, end, known)
                if count == 0:
                    return False
                t += max(count, 0)
                self._position += max(count, 0)
                continue
            if known is not None and at_once and (end - t > 1 or known.structure is not LEAF):
                count = self._run(stream, sink, t, end, known)
                t, at_once = t + count, count > 0  # a stream may have no item that can be taken so
                if t == end:
                    break
            item = stream.next_item()
            if item is END:
                return False
            try:
                layout, leaves = self._take_apart(item, sink)
                sink.put_step(self._row, t, layout, leaves)
            except Misfit as misfit:
                raise self._misfit(stream, misfit) from None
            t += 1
            self._position += 1
        return True

    def _run(self, stream: OpenedStream, sink: PartWriter, t: int, end: int, layout: Layout) -> int:
        """Read single steps in one go, as long as they are like the first; how many. `next_item` has what follows."""
        before, last = stream.items, stream.stop
        if last is not None:  # what comes behind it is the end, or an error
            end = min(end, t + last - before)
        if end <= t:
            return 0
        try:
            stream.run(functools.partial(sink.put_run, self._row, t, end, layout))
        finally:
            count = stream.items - before
            self._position += count
        return count

    def _write_steps(self, stream: OpenedStream, sink: PartWriter, t: int, end: int, layout: Layout) -> int:
        """Have the stream write time steps itself; how many it wrote, 0 if it had ended, -1 for an item to take."""
        try:
            room = sink.room(self._row, t, end, layout)
        except Misfit as misfit:
            raise self._misfit(stream, misfit) from None
        count = stream.read_into(room, end - t)
        if count > 0:
            sink.wrote(self._row, t + count)
        return count

    def _read_window(self, stream: OpenedStream, sink: PartWriter, _t: int, _stop: int) -> bool:
        """Read one window that the stream cut itself; False if the stream had ended."""
        while True:
            item = stream.next_item()
            if item is END:
                return False
            if self._by_lane:
                try:
                    sink.put_object(self._row, item)
                except Misfit as misfit:
                    raise stream.error(ItemError, str(misfit), handed_out=True) from None
                self._position += 1
                return True
            try:
                layout = self._layout
                if layout is None:
                    layout, leaves = self._take_apart(item, sink)
                    count = layout.window_length(leaves)
                else:
                    leaves, count = layout.read_window(item)
                if count == 0:  # a window of no steps holds nothing
                    continue
                first = self._first_window = self._first_window or count
                sink.put_window(self._row, layout, leaves, count, first if first > count else count)
            except Misfit as misfit:
                raise self._misfit(stream, misfit) from None
            self._position += count
            return True

    def _take_apart(self, item: object, sink: PartWriter) -> tuple[Layout, Leaves]:
        """An item's leaves; the stream's first item says what they must be."""
        if self._layout is not None:
            return self._layout, self._layout.read(item)
        layout, leaves = Layout.of(item, windowed=self._rules.time_steps is None)
        self._layout, self._unmet = sink.intern(layout), layout
        return self._layout, leaves

    def _misfit(self, stream: OpenedStream, misfit: Misfit) -> StreamError:
        if isinstance(misfit, StreamMisfit):  # whether it fits must not depend on where in the window it starts
            self._between = stream.error(ItemError, f"{misfit}; {ALIKE}", handed_out=True)
            return self._between
        remedy = "; all items of a stream must share structure, dtypes and shapes"
        return stream.error(ItemError, f"{misfit}{remedy}", handed_out=True)

    def _next_stream(self, time: int) -> OpenedStream | None:
        """Take the next source; None, for good, if there is none left for this lane."""
        rules = self._rules
        self._layout, self._unmet, self._first_window, self._position = None, None, 0, 0
        draws = self._draws_without_item
        if rules.padding_mode == "cycle" and draws >= rules.most_draws(self.index) + rules.lookahead:
            raise EmptySourcesError(
                f"lane {self.index} drew {draws} sources in a row, of {rules.num_sources} there are, and none yielded "
                'an item; padding_mode="cycle" would go on for ever',
                lane=self.index,
            )
        if rules.padding_mode != "data" or draws < rules.draws_of(self.index):
            self._stream = self._opener.next(self.index, time)
        self._draws_without_item += 1
        self.idle = self._stream is None
        self.fresh = False
        if self._stream is not None:
            self.fresh, self._position = self._stream.fresh, self._stream.begin
        return self._stream

    def _resumed_stream(self, start: LaneState) -> OpenedStream | None:
        """The stream that was being read before, opened where it stood."""
        self._start, stream = None, self._opener.resume(self.index, start)
        if stream is not None:
            self._position, self._first_window, self.fresh = start.position, start.first_window, stream.fresh
        return stream

    def _close_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            if self._stream.retried:
                self._meter.retried(self._stream.retried)
            self._stream, self.keeps_state = None, False
            self._reading[self.batch_lane] = 0

    def close(self) -> None:
        """Close the stream that is open."""
        self._close_stream()
