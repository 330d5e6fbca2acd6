"""Counts of a loader's batches in the main process, for `StreamDataLoader.stats`.

Guarantee: counting takes a microsecond per batch, and never fails.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from stream_dataloader._engine.assembly.part import Part
from stream_dataloader._engine.items.layout import Layout, storage_dtype
from stream_dataloader._engine.reading.activity import Meters, clock
from stream_dataloader._engine.schedule.rules import NONE, Reader
from stream_dataloader.stats import Events, LoaderStats, TraceEvent

__all__ = ["BatchCounts", "clock"]

_EVENTS = 4096


class BatchCounts:
    """The counts of one loader, over all of its epochs."""

    def __init__(self, readers: Sequence[Reader], time_steps: int | None, *, shared: bool) -> None:
        self._lanes, self._time_steps = readers[-1].lanes.stop, time_steps
        self.meters = Meters(len(readers), shared=shared)
        names = ("batches", "items", "begun", "cells", "late_cells", "bytes", "copies", "skipped", "gaps", "restarts")
        self.totals: dict[str, Any] = dict.fromkeys(names, 0)  # by names of `LoaderStats`
        self._wait_ns = 0
        self._total_ns = 0
        self._mark: int | None = None  # the end of the previous batch, in the same epoch
        self._waits_since: int | None = None  # since when the trainer waits for a batch
        self._layout: Layout | None = None
        self._item_bytes = 0
        self._events: deque[tuple[int | None, int, int, int]] = deque(maxlen=_EVENTS)

    def begin(self, begin: int) -> None:
        """Count the start of an epoch, which took from `begin` until now."""
        self._mark = clock()
        self._wait_ns += self._mark - begin
        self._total_ns += self._mark - begin

    def wait(self) -> int:
        """Note that the trainer waits for a batch from now on; return the time."""
        self._waits_since = clock()
        return self._waits_since

    def batch(self, begin: int, step: int, parts: Sequence[Part | None], layout: Layout | None) -> None:
        """Count a batch, given the parts that readers sent, also those without an item."""
        items, time_steps, counts = 0, self._time_steps, self.totals
        longest = time_steps or 0
        for part in parts:
            if part is not None:
                items += part.items
                counts["late_cells"] += part.late
                if part.reports.taken:  # rarely true, so the count below costs nothing in most steps
                    counts["begun"] += _begun_in(part)
                if time_steps is None and part.contents.time_steps > longest:
                    longest = part.contents.time_steps
        if layout is not self._layout:
            self._layout, self._item_bytes = layout, 0 if layout is None else _bytes_of(layout)
        cells = longest * self._lanes
        counts["batches"] += 1
        counts["items"] += items
        counts["bytes"] += items * self._item_bytes
        counts["cells"] += cells if cells > items else items
        self._pass(begin, step)

    def pass_over(self, parts: Iterable[Part | None]) -> None:
        """Count the streams that began in a step which is not delivered, as no stream had an item yet."""
        self.totals["begun"] += sum(_begun_in(part) for part in parts if part is not None)

    def joined(self, begin: int, step: int, counts: Mapping[str, int], cells: int) -> None:
        """Count a batch that was joined from batches of other loaders, given their counts."""
        for name, count in {"batches": 1, "cells": cells, **counts}.items():
            self.totals[name] += count
        self._pass(begin, step)

    def _pass(self, begin: int, step: int) -> None:
        now, mark = clock(), self._mark
        self._total_ns += now - (begin if mark is None else mark)
        self._wait_ns += now - begin
        self._events.append((mark, begin, now, step))
        self._mark, self._waits_since = now, None

    def end(self) -> None:
        self._mark = self._waits_since = None

    def stats(self, slots_in_use: int, slots: int) -> LoaderStats:
        """Return the counts until now, including a wait that still goes on."""
        of_workers, of_batches = self.meters.events(), tuple(self._events)
        now, mark, waits_since = clock(), self._mark, self._waits_since  # another thread may be reading
        total_ns, wait_ns = self._total_ns, self._wait_ns
        if waits_since is not None:
            total_ns += now - (waits_since if mark is None else mark)
            wait_ns += now - waits_since
        return LoaderStats(
            seconds=total_ns / 1e9,
            wait_seconds=wait_ns / 1e9,
            workers=self.meters.stats(None if mark is None else now),
            slots_in_use=slots_in_use,
            slots=slots,
            events=Events(lambda: _in_order(of_workers, of_batches)),
            **self.totals,
        )


def _begun_in(part: Part) -> int:
    return sum([draw != NONE for _, draw in part.reports.taken])


def _in_order(
    of_workers: Callable[[], list[TraceEvent]], of_batches: Iterable[tuple[int | None, int, int, int]]
) -> list[TraceEvent]:
    events = of_workers()
    for mark, begin, stop, step in of_batches:
        events.append(TraceEvent(-1, "batch", begin, stop, step))
        if mark is not None:
            events.append(TraceEvent(-1, "train", mark, begin, step - 1))
    return sorted(events, key=lambda event: event.start_ns)


def _bytes_of(layout: Layout) -> int:
    return sum(
        math.prod(spec.shape) * storage_dtype(spec.dtype).itemsize
        for spec in layout.specs
        if spec.dtype is not None and spec.timed
    )
