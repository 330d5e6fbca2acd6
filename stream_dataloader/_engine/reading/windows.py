"""Cutting of one stream into the windows of a row, and the check whether it goes on after a window.

Only the item after a window is ever taken early. It waits until other lanes have read, and streams may reuse a buffer,
so it is kept as a copy.

Guarantee: every item goes to the writer once, in order.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from stream_dataloader._engine.assembly.writer import PartWriter
from stream_dataloader._engine.items.layout import DTYPES_OF_NUMPY, Layout, Leaves, as_tensor, storage_dtype
from stream_dataloader._engine.items.objects import lasting
from stream_dataloader._engine.items.structure import ALIKE, ITEMS_ALIKE, Misfit, StreamMisfit
from stream_dataloader._engine.reading.opening import END
from stream_dataloader._engine.reading.stream import OpenedStream
from stream_dataloader.errors import ItemError, StreamError
from stream_dataloader.protocols import NOTHING_YET


class StreamWindows:
    """Cuts one stream into windows.

    Attributes:
        position: Time steps read from it.
        begin: Time steps read before this row began with it.
        behind: Number of its next items that are read again, as context.
        first_window: Steps of its first window.
        between: An error about a mismatch of two streams.
        new_layout: The layout of its first item until the writer was told of it, which happens once an item was read.
        waits: Whether the stream had no item yet, so that the rest of the window that was read last stays padding.
    """

    # As in `Handle`, what most streams never change.
    behind = first_window = 0
    waits = False
    between: StreamError | None = None
    new_layout: Layout | None = None
    _layout: Layout | None = None  # of the stream's first item

    def __init__(self, stream: OpenedStream, writer: PartWriter, row: int, time_steps: int | None) -> None:
        self.stream, self._writer, self._row, self._time_steps = stream, writer, row, time_steps
        self.begin = self.position = stream.section.start
        if stream.place is not None:
            self.position, self.first_window = stream.place.position, stream.place.first_window

    def read_steps(self, t: int, stop: int) -> bool:
        """Read single steps from `t` up to `stop`; return False if the stream ended before."""
        stream, at_once = self.stream, True
        if self.waits:
            self.waits = False
        while t < stop:
            known, alike = self._layout, stream.alike
            if known is None and (alike is not None or stream.first is not END):
                known = self._writer.usual(self._row, alike)
            writes = known is not None and stream.writes and not known.has_objects
            if known is not None and writes and not stream.has_item:
                count = self._write(t, stop, known)
                if count > 0:
                    self._layout = known
                    t += count
                    self.position += count
                    if t < stop and alike is not None and stream.stop in (None, stream.items):
                        return False  # it had more room, so it has ended
                elif not count:
                    return False
                continue
            if known is not None and at_once and stream.runs:
                count = self._run(t, t + 1 if writes else stop, known)
                t, at_once = t + count, count > 0  # a stream may have no item that can be taken in a run
                if count:
                    self._layout = known
                if t == stop or (writes and count):
                    continue
            item = stream.next_item()
            if item is END:
                return False
            if item is NOTHING_YET:
                self.waits = True
                return True
            try:
                layout = self._layout
                layout, leaves = self._learn(item) if layout is None else (layout, layout.read(item))
                self._writer.put_step(self._row, t, layout, leaves)
            except (Misfit, OverflowError) as misfit:
                raise self._misfit(misfit) from None
            t += 1
            self.position += 1
        return True

    def _run(self, t: int, end: int, layout: Layout) -> int:
        """Read single steps in one go, as long as they have the layout of the first; return their number."""
        stream, before = self.stream, self.stream.items
        if stream.stop is not None:  # after this item comes the end, or an error, which `next_item` has to see
            end = min(end, t + stream.stop - before)
        if end <= t:
            return 0
        try:
            stream.run(functools.partial(self._writer.put_run, self._row, t, end, layout))
        finally:
            count = stream.items - before
            self.position += count
        return count

    def _write(self, t: int, end: int, layout: Layout) -> int:
        """Let the stream write time steps itself; return their number, 0 at its end, -1 if an item is to be taken."""
        stream = self.stream
        if stream.stop is not None and 0 < (left := stream.stop - stream.items) < end - t:
            # One that fills its room gets room for one more at its end, to see that it has no more.
            end = t + left + (stream.alike is not None and stream.section.ends)
        try:
            block, room = self._writer.room(self._row, t, end, layout)
        except Misfit as misfit:
            raise self._misfit(misfit) from None
        count = stream.read_into(room, end - t)
        if count > 0:
            block.counts[self._row] = t + count
        return count

    def read_window(self, t: int, stop: int) -> bool:  # noqa: ARG002
        """Read one window that the stream cut itself; return False if the stream had ended."""
        self.waits = False
        while (item := self.stream.next_item()) is not END:
            if item is NOTHING_YET:
                self.waits = True
                return True
            try:
                layout = self._layout or self._learn(item)[0]
                count = self._writer.put_window(self._row, layout, item, self.first_window)
            except (Misfit, OverflowError) as misfit:
                raise self._misfit(misfit) from None
            if count:  # a window without time steps is skipped
                self.first_window = self.first_window or count
                self.position += count
                return True
        return False

    def pass_window(self, t: int, stop: int) -> bool:  # noqa: ARG002
        """Pass on one window as the stream cut it; return False if the stream had ended."""
        item = self.stream.next_item()
        if item is END:
            return False
        self.waits = item is NOTHING_YET
        if self.waits:
            return True
        try:
            self._writer.put_object(self._row, item)
        except Misfit as misfit:
            raise self.stream.error(ItemError, str(misfit), handed_out=True) from None
        self.position += 1
        return True

    def _learn(self, item: object) -> tuple[Layout, Leaves]:
        """Take apart a stream's first item, which sets the layout of all others."""
        layout, leaves = Layout.of(item, windowed=self._time_steps is None)
        self._layout, self.new_layout = self._writer.intern(layout), layout
        if self.stream.alike is not None:
            self._writer.alike[self.stream.alike] = self._layout
        return self._layout, leaves

    def _misfit(self, misfit: Misfit | OverflowError) -> StreamError:
        # Whether a stream fits the others must not depend on where in the window it starts, so `on_error` is not asked.
        if isinstance(misfit, StreamMisfit):
            self.between = self.stream.error(ItemError, f"{misfit}; {ALIKE}", handed_out=True)
            return self.between
        what = f"a number does not fit its dtype: {misfit}" if isinstance(misfit, OverflowError) else str(misfit)
        return self.stream.error(ItemError, f"{what}; {ITEMS_ALIKE}", handed_out=True)

    @property
    def known_stop(self) -> int | None:
        """The time step behind the last one, if it is known."""
        return None if self._time_steps is None else self.stream.stop

    def has_ended(self, error: StreamError | None) -> bool:
        """Return whether its last time step was read, when a lane leaves it at its end or after an error."""
        return self.position > self.stream.section.start and (error is None or self.position == self.known_stop)

    def ends(self) -> bool:
        """Return whether it ends with the window that it filled; if this is not known, take its next item ahead."""
        stream, layout = self.stream, self._layout
        if layout is None:
            return False
        if (stop := self.known_stop) is not None:
            return self.position == stop
        writes = stream.writes and not layout.windowed and not layout.has_objects
        return not stream.look_ahead(functools.partial(_written if writes else _iterated, stream, layout))


def _iterated(stream: OpenedStream, layout: Layout) -> list[Any]:
    """Take the next item; of a stream of windows, all up to the first that has time steps."""
    taken: list[Any] = []
    while True:
        item = stream.next_item()
        if item is NOTHING_YET:
            remedy = "mark_ends=True needs to know whether an item follows; leave mark_ends out"
            raise stream.error(ItemError, f"the stream yielded NOTHING_YET, and {remedy}")
        item, tells = (item, True) if item is END else _kept(item, layout)
        taken.append(item)
        if tells:
            return taken


def _kept(item: Any, layout: Layout) -> tuple[Any, bool]:
    """Return an item that outlives the stream's buffer, and whether it holds a time step."""
    if type(item) is np.ndarray and not layout.windowed:  # a shortcut for the most frequent case
        return item.copy(), True
    try:
        leaves = layout.read(item)
        tells = not layout.windowed or layout.window_length(leaves) > 0
    except Misfit:  # the error that follows names the item's layout only, so its content need not be kept
        return item, True
    return _rebuilt(layout, [*map(lasting, leaves)]), tells


def _written(stream: OpenedStream, layout: Layout) -> list[Any]:
    """Take the next item of a stream that writes its items itself, as it must not be iterated any more."""
    columns = [np.empty((1, *spec.shape), storage_dtype(spec.dtype)) for spec in layout.specs if spec.dtype is not None]
    count = stream.read_into(_rebuilt(layout, columns), 1)
    if count < 0:  # the stream was opened again, which has taken an item
        item = stream.next_item()
        return [item if item is END else _kept(item, layout)[0]]
    return [_rebuilt(layout, [column[0, ...] for column in columns]) if count else END]


def _rebuilt(layout: Layout, leaves: Leaves) -> Any:
    """Build an item from leaves as `Layout.read` returns them, so that it can be read again."""
    return layout.build(
        as_tensor(leaf, spec.dtype)
        if spec.dtype is not None and spec.dtype not in DTYPES_OF_NUMPY and isinstance(leaf, np.ndarray)
        else leaf
        for spec, leaf in zip(layout.specs, leaves, strict=True)
    )
