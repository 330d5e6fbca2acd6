"""Statistics of a loader: counts, and the use of its time.

Guarantee: plain numbers, taken at one moment; they do not change afterwards.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from stream_dataloader._engine.advice import Advice, Figures, WorkerStats, advise, available_cores, rate
from stream_dataloader._engine.html import escaped, page, table

__all__ = ["LoaderStats", "TraceEvent", "WorkerStats"]


class TraceEvent(NamedTuple):
    """An event with its duration.

    Attributes:
        worker: The worker's number; -1 is the trainer's process.
        kind: `"step"`: a worker reads its lanes' windows of a batch. `"open"`: it opens a stream. `"open ahead"`: its
            background thread opens a stream. `"wait"`: it waits until it may take the next source. `"batch"`: the
            trainer waits for a batch. `"train"`: the trainer works between two batches.
        start_ns: Time of its start, by `time.monotonic_ns`.
        stop_ns: Time of its end.
        number: The batch, or the source that is opened; -1 if there is none.
    """

    worker: int
    kind: str
    start_ns: int
    stop_ns: int
    number: int


class Events(Sequence[TraceEvent]):
    """Events that are assembled at the first access, because this takes longer than all other statistics."""

    def __init__(self, make: Callable[[], Iterable[TraceEvent]]) -> None:
        self._make = make

    @cached_property
    def _made(self) -> tuple[TraceEvent, ...]:
        return tuple(self._make())

    def __len__(self) -> int:
        return len(self._made)

    def __getitem__(self, index: Any) -> Any:
        return self._made[index]

    def __reduce__(self) -> tuple[type[tuple[TraceEvent, ...]], tuple[tuple[TraceEvent, ...]]]:
        return tuple, (self._made,)


@dataclass(frozen=True, kw_only=True)
class LoaderStats(Figures):
    """Statistics of a loader since it was built, over all epochs. Subtract earlier ones for the time in between.

    Attributes:
        seconds: Time since the first `next`, without times in which no epoch was read.
        batches: Batches that were handed out.
        items: Time steps in these batches, without padding.
        begun: Streams that began in these batches, including those without an item.
        cells: Cells of these batches, T x B for each batch.
        late_cells: Cells that are padding because streams yielded `NOTHING_YET`; of streams that cut their own
            windows, the number of windows.
        bytes: Bytes of the items' arrays and tensors.
        wait_seconds: Time that the trainer waited for batches.
        workers: Figures of each worker; with `num_workers=0` of one, the process itself.
        slots_in_use: Slots of shared memory that batches hold, or that are being filled, at this moment.
        slots: Number of slots.
        copies: Batches that were copied, because too many earlier ones are held.
        skipped: Streams that were skipped after an error.
        gaps: How often a live stream was opened again after an error and went on from now: see `loader.failures`.
        restarts: How often workers were restarted after one died.
        events: The last few thousand events of each process, with their durations; see `save_trace`.
        setup: Options of the loader, for `advice`; None if they are not known.

    Example:
        >>> from stream_dataloader import StreamDataLoader, StreamDataset
        >>> loader = StreamDataLoader(StreamDataset([5, 2], range, batch_size=2, time_steps=3))
        >>> for batch in loader:
        ...     pass
        >>> stats = loader.stats()
        >>> stats.batches, stats.items, stats.cells, round(stats.padding_share, 2)
        (2, 7, 12, 0.42)
    """

    slots_in_use: int = 0
    slots: int = 0
    copies: int = 0
    skipped: int = 0
    gaps: int = 0
    restarts: int = 0
    events: Sequence[TraceEvent] = dataclasses.field(default=(), repr=False)

    @property
    def batches_per_second(self) -> float:
        """Batches per second; 0 before the first."""
        return rate(self.batches, self.seconds)

    @property
    def items_per_second(self) -> float:
        """Time steps per second, without padding."""
        return rate(self.items, self.seconds)

    @property
    def bytes_per_second(self) -> float:
        """Bytes of items per second."""
        return rate(self.bytes, self.seconds)

    @property
    def opened(self) -> int:
        """Number of streams that all workers opened."""
        return int(self._sum("opened"))

    @property
    def retried(self) -> int:
        """Number of times that streams were opened again after an error, including streams that are still open."""
        return int(self._sum("retried"))

    def __sub__(self, earlier: LoaderStats) -> LoaderStats:
        """Return the statistics since `earlier`; slots have their current values."""
        if not isinstance(earlier, LoaderStats):
            return NotImplemented
        now: dict[str, Any] = {"slots": self.slots, "slots_in_use": self.slots_in_use, "setup": self.setup}
        now["workers"] = tuple(
            _difference(one, other) for one, other in zip(self.workers, earlier.workers, strict=True)
        )
        now["events"] = Events(lambda: _events_since(self.events, earlier.events))
        found: LoaderStats = _difference(self, earlier, leave_out=tuple(now))
        return dataclasses.replace(found, **now)

    def advice(self, *, padding_share: float | None = None, cores: int | None = None) -> Advice:
        """Return one sentence: the change that would make the run faster, or that none would; `print` it.

        Read some dozens of batches first, and leave out the start of workers: `(loader.stats() - earlier).advice()`.

        Args:
            padding_share: Share of padding in the whole epoch, if known; None computes it from `lengths`, or takes the
                share in the batches so far, leaving out cells that were late.
            cores: Number of cores that may be used; None asks the system.
        """
        if self.setup is None:
            return Advice("unknown", "There is no advice, as these figures do not belong to a loader.")
        if padding_share is None:
            forecast = self.setup.forecast
            padding_share = self.idle_share if forecast is None else forecast.padding_share
        return advise(self, self.setup, padding_share, available_cores() if cores is None else cores)

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers as plain data, for a log; without `events` and `setup`, with rates and shares."""
        found = dataclasses.asdict(dataclasses.replace(self, events=(), setup=None))
        del found["events"], found["setup"]
        names = ("batches_per_second", "items_per_second", "bytes_per_second", "wait_share", "padding_share")
        return found | {name: getattr(self, name) for name in (*names, "opened", "retried", "sent")}

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the last few thousand events for Perfetto (https://ui.perfetto.dev) or `chrome://tracing`.

        Args:
            path: A JSON file in Chrome's trace event format; an existing one is replaced.

        Raises:
            OSError: The file cannot be written.
        """
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": list(_chrome_events(self.events)), "displayTimeUnit": "ms"}, file)

    def _sums(self) -> list[str]:
        return [
            f"{self.batches:,} batches in {self.seconds:.1f} s: {self.batches_per_second:,.1f} batches/s, "
            f"{self.items_per_second:,.0f} items/s, {self.bytes_per_second / 1e6:,.1f} MB/s",
            f"the trainer waited {self.wait_share:.0%} of the time; padding {self.padding_share:.1%}; "
            f"slots {self.slots_in_use} of {self.slots} in use, {self.copies} copies, {self.sent} parts sent",
            f"streams: {self.opened} opened, {self.skipped} skipped, {self.retried} retried, {self.gaps} gaps; "
            f"{self.restarts} restarts",
        ]

    def _rows(self) -> list[list[str]]:
        rows = [["worker", "reading", "opening", "waiting", "idle", "ahead", "items"]]
        for number, worker in enumerate(self.workers):
            seconds = dataclasses.astuple(worker)[:5]
            rows.append([str(number), *(f"{value:.2f} s" for value in seconds), f"{worker.items:,}"])
        return rows

    def __str__(self) -> str:
        widths = (6, 8, 8, 8, 8, 8, 12)
        rows = (" ".join(map(str.rjust, row, widths)) for row in self._rows())
        return "\n".join([*self._sums(), *rows])

    def _repr_html_(self) -> str:
        return page(self._html, self.__str__)

    def _html(self) -> str:
        head, *rows = self._rows()
        return "".join(f"<div>{escaped(line, 200)}</div>" for line in self._sums()) + table(head, rows)


def _events_since(now: Sequence[TraceEvent], then: Sequence[TraceEvent]) -> Iterator[TraceEvent]:
    since = max((event.stop_ns for event in then), default=0)
    return (event for event in now if event.stop_ns > since)


def _difference(now: Any, then: Any, leave_out: tuple[str, ...] = ()) -> Any:
    names = [field.name for field in dataclasses.fields(now) if field.name not in leave_out]
    return type(now)(**{name: getattr(now, name) - getattr(then, name) for name in names})


def _chrome_events(events: Sequence[TraceEvent]) -> Iterator[dict[str, Any]]:
    """Yield events for Chrome's trace viewer: microseconds since the first, and rows per worker."""
    first = min((event.start_ns for event in events), default=0)
    yield {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "stream_dataloader"}}
    workers = sorted({event.worker for event in events})
    rows = {worker: 2 * number for number, worker in enumerate(workers)}
    for worker, row in rows.items():
        who = f"worker {worker}"
        for tid, name in enumerate(("trainer",) if worker < 0 else (who, f"{who}, ahead"), row):
            yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": tid, "args": {"sort_index": tid}}
    for event in sorted(events, key=lambda event: event.start_ns):
        what = "source" if event.kind in ("open", "open ahead") else "batch"
        yield {
            "ph": "X",
            "name": event.kind,
            "pid": 0,
            "tid": rows[event.worker] + (event.kind == "open ahead"),
            "ts": (event.start_ns - first) / 1000,
            "dur": (event.stop_ns - event.start_ns) / 1000,
            "args": {} if event.number < 0 else {what: event.number},
        }
