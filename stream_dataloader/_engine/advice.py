"""Advice that makes a run faster, derived from its figures: `advise`, for `LoaderStats.advice`.

Guarantee: a pure function. The largest cost comes first.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stream_dataloader._engine.schedule.forecast import Forecast

_MUCH_PADDING = 0.2
_LONG_WAIT = 0.1  # of the trainer's time
_BUSY = 0.7  # of a worker's time
_TINY_SECONDS = 200e-6  # for a lane's window: the cost of its bookkeeping, also on a busy machine
_TINY_BYTES = 1 << 16  # of a lane's window
_FROM_MEMORY = 300e6  # bytes per second and worker; no decoder is as fast
_MUCH_WAITING = 0.3  # of workers' time


class Advice(NamedTuple):
    """A sentence about what to change.

    Attributes:
        kind: The topic, such as `"nothing"` or `"sections"`; the guide on monitoring lists all.
        text: The sentence, with the figures that it follows from.
    """

    kind: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Options of a loader that its speed depends on, for this rank.

    Attributes:
        lanes: Number of lanes.
        time_steps: Time steps of a window.
        packed: Whether streams follow each other within a window.
        sources: Number of sources.
        num_workers: Number of workers.
        prefetch_factor: Number of batches that workers read ahead.
        forecast: Forecast of padding, if lengths are known.
    """

    lanes: int
    time_steps: int | None
    packed: bool
    sources: int
    num_workers: int
    prefetch_factor: int
    forecast: Forecast | None = None


@dataclass(frozen=True, kw_only=True)
class WorkerStats:
    """Figures of one worker.

    Attributes:
        reading_seconds: Taking items from streams and writing them into the batch.
        opening_seconds: Opening streams, or waiting for its background thread to open one.
        waiting_seconds: Waiting until it may take its next source, as other workers are behind in logical time.
        idle_seconds: Waiting until the next batch is requested, and sending parts of batches.
        opening_ahead_seconds: Opening streams in the background thread, at the same time.
        items: Time steps that it read.
        steps: Batches for which it read its lanes.
        sent: Number of these that were sent through the message queue instead of a slot.
        opened: Streams that it opened.
        retried: How often a stream was opened again after an error.
    """

    reading_seconds: float = 0.0
    opening_seconds: float = 0.0
    waiting_seconds: float = 0.0
    idle_seconds: float = 0.0
    opening_ahead_seconds: float = 0.0
    items: int = 0
    steps: int = 0
    sent: int = 0
    opened: int = 0
    retried: int = 0


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of `LoaderStats` that advice is derived from."""

    seconds: float = 0.0
    batches: int = 0
    items: int = 0
    begun: int = 0
    cells: int = 0
    late_cells: int = 0
    bytes: int = 0
    wait_seconds: float = 0.0
    workers: tuple[WorkerStats, ...] = ()
    setup: Setup | None = field(default=None, repr=False)

    @property
    def wait_share(self) -> float:
        """Share of its time that the trainer waited for data, 0 to 1."""
        return rate(self.wait_seconds, self.seconds)

    @property
    def padding_share(self) -> float:
        """Share of padding in the batches, 0 to 1."""
        return 1 - self.items / self.cells if self.cells else 0.0

    @property
    def late_share(self) -> float:
        """Share of the batches that is padding as streams had no item yet, 0 to 1."""
        return rate(self.late_cells, self.cells)

    @property
    def idle_share(self) -> float:
        """Share of padding in the batches, 0 to 1, leaving out cells that were late."""
        return 1 - rate(self.items, self.cells - self.late_cells) if self.cells > self.late_cells else 0.0

    @property
    def sent(self) -> int:
        """Number of workers' parts of batches that were sent through the message queue instead of a slot."""
        return int(self._sum("sent"))

    def _sum(self, name: str) -> Any:
        """Add up a number of all workers."""
        return sum(getattr(worker, name) for worker in self.workers)


def rate(count: float, seconds: float) -> float:
    """Return a count per second; 0 if no time has passed."""
    return count / seconds if seconds > 0 else 0.0


def advise(figures: Figures, setup: Setup, padding_share: float, cores: int) -> Advice:
    """Return the advice for figures, about the largest cost."""
    if figures.batches < 2:
        return Advice("unknown", f"Too few batches to tell anything from ({figures.batches}): read more.")
    if padding_share >= _MUCH_PADDING:
        return _about_padding(figures, setup, padding_share)
    if figures.late_share >= _MUCH_PADDING:
        share = f"{figures.late_share:.0%} of the batches is padding, as streams had no item yet"
        return Advice("late streams", f"{share}: wait longer (max_wait_seconds= of streams.live), or see why.")
    if figures.wait_share < _LONG_WAIT:
        waits = f"waits {figures.wait_share:.0%} of its time"
        return Advice("nothing", f"The trainer is slower than the loader, and {waits}: nothing is to gain here.")
    # Without workers the trainer itself reads, so it is always busy while it waits.
    busy = max(map(_busy_share, figures.workers), default=0.0) if setup.num_workers else 1.0
    windows = figures.batches * setup.lanes
    seconds = figures._sum("reading_seconds") + figures._sum("opening_seconds")
    # The bytes are 0 if items are objects, whose size is not known.
    if seconds < _TINY_SECONDS * windows and 0 < figures.bytes < _TINY_BYTES * windows:
        small = f"A lane's window is {figures.bytes / windows:,.0f} bytes, and to keep account of it takes long"
        return Advice("larger windows", f"{small}: make windows larger (time_steps), or yield chunks of steps.")
    waited = figures._sum("waiting_seconds")
    waiting = rate(waited, waited + seconds + figures._sum("idle_seconds"))
    if waiting > _MUCH_WAITING:  # checked before busy workers, as one of them may be busy with a slow stream
        waits = f"The trainer waits {figures.wait_share:.0%} of its time, workers {waiting:.0%} for each other"
        return Advice("lookahead", f"{waits}: reserve more sources (lookahead=), or use deterministic=False.")
    if busy >= _BUSY:
        return _about_busy_workers(figures, setup, cores)
    return _about_idle_workers(figures, setup)


def _busy_share(worker: WorkerStats) -> float:
    """Return the share of its time in which a worker read or opened streams, 0 to 1."""
    busy = worker.reading_seconds + worker.opening_seconds
    return rate(busy, busy + worker.waiting_seconds + worker.idle_seconds)


def _about_padding(figures: Figures, setup: Setup, padding_share: float) -> Advice:
    share = f"{padding_share:.0%} of the batches is padding"
    if setup.forecast is not None and (better := setup.forecast.alternatives):
        text = f"{share}; with {better[0].option} it would be {better[0].padding_share:.0%}"
        others = f" ({', '.join(map(str, better[1:]))})" if better[1:] else ""
        return Advice(better[0].kind, f"{text}{others}.")
    if 0 < setup.sources < setup.lanes:
        few = f"{share}, with {setup.sources} sources for {setup.lanes} lanes"
        return Advice("fewer lanes", f"{few}: use batch_size={setup.sources}, or cut the sources (sections=).")
    if _window_padding(figures, setup) >= 0.5 * padding_share:
        remedy = 'use windows="packed", or smaller windows (time_steps)'
        return Advice("packed windows", f"{share}, behind streams that end within a window: {remedy}.")
    remedy = 'cut these (sections=), or have them come first (schedule="longest_first", with lengths)'
    return Advice("sections", f"{share}, as lanes run out of sources while others read long ones: {remedy}.")


def _window_padding(figures: Figures, setup: Setup) -> float:
    """Estimate the share of the batches that pads the last windows of streams."""
    time_steps = setup.time_steps
    if time_steps is None or setup.packed or not (figures.begun and figures.cells > figures.late_cells):
        return 0.0
    length = figures.items / figures.begun
    padding = time_steps - length if length < time_steps else (time_steps - 1) / 2
    return figures.begun * padding / (figures.cells - figures.late_cells)


def _about_busy_workers(figures: Figures, setup: Setup, cores: int) -> Advice:
    most = min(setup.lanes, cores)
    reading, opening = figures._sum("reading_seconds"), figures._sum("opening_seconds")
    waits = f"The trainer waits {figures.wait_share:.0%} of its time"
    if setup.num_workers < most:
        who = ("nothing is read in the meantime", "the worker reads all the time")[setup.num_workers > 0]
        if setup.num_workers > 1:
            who = f"{setup.num_workers} workers read all the time"
        return Advice("workers", f"{waits}, and {who}: use more workers (num_workers={most}).")
    if opening > reading:
        remedy = "have them opened ahead (declare open_early = True on the factory, if it may run in a second thread)"
        if figures._sum("opening_ahead_seconds"):
            remedy = "reserve more of them ahead (lookahead=2)"
        return Advice("open ahead", f"{waits}, and workers open streams more than they read: {remedy}.")
    if setup.lanes < cores:
        each = f"each of the {setup.lanes} lanes has a worker, of {cores} cores"
        return Advice("more lanes", f"{waits}, and {each}: use more lanes (batch_size), or pack (stores.pack).")
    speed = rate(figures.bytes, reading + opening)
    if speed > _FROM_MEMORY:
        fast = f"a worker reads {speed / 1e6:,.0f} MB/s, about the speed of memory"
        return Advice("smaller items", f"{waits}, and {fast}: make items smaller (size, dtype).")
    busy = f"workers keep all {cores} cores busy"
    return Advice("pack", f"{waits}, and {busy}: decode once (stores.pack), or make items smaller.")


def _about_idle_workers(figures: Figures, setup: Setup) -> Advice:
    waits = f"The trainer waits {figures.wait_share:.0%} of its time, and workers are idle"
    if figures.sent > 0.5 * figures.batches * setup.num_workers:
        sent = f"{figures.sent} parts of batches went through the message queue, not through shared memory"
        return Advice("arrays", f"{waits}: {sent}; yield arrays of one shape and dtype, not objects.")
    more = f"prefetch_factor={4 * setup.prefetch_factor}"
    return Advice("prefetch", f"{waits} at times, as some batches take much longer: read more ahead ({more}).")


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
