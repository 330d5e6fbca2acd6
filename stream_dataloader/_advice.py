"""What would make a run faster, told by its figures: `advise`, for `LoaderStats.advice`.

Guarantee: a pure function. What costs most comes first::

    padding?            fewer lanes | sections | packed windows       computed for nothing, however fast it is read
    the trainer waits?  no: nothing to gain
    workers busy?       yes: open ahead | more workers | more lanes | pack it | smaller items
                        no:  arrays in place of objects | larger windows | lookahead | prefetch
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Advice", "Busy", "Figures", "Setup", "advise", "available_cores"]

_MUCH_PADDING = 0.2
_LONG_WAIT = 0.1  # of the trainer's time
_BUSY = 0.7  # of a worker's time
_TINY_SECONDS = 200e-6  # for a lane's window: what it costs to keep account of it, on a busy machine too
_TINY_BYTES = 1 << 16  # of a lane's window
_FROM_MEMORY = 300e6  # bytes a second and worker: nothing is decoded as fast
_MUCH_GRANTING = 0.3  # of workers' time


class Advice(NamedTuple):
    """A sentence about what to change.

    Attributes:
        kind: What it is about, one of `"nothing"`, `"unknown"`, `"fewer lanes"`, `"sections"`, `"packed windows"`,
            `"workers"`, `"more lanes"`, `"open ahead"`, `"pack"`, `"smaller items"`, `"arrays"`, `"larger windows"`,
            `"lookahead"`, `"prefetch"`.
        text: The sentence, with the figures that it follows from.
    """

    kind: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a loader was built, as far as its speed depends on it.

    Attributes:
        lanes: Number of lanes of this rank, B.
        time_steps: Time steps of a window, T; None: streams cut windows themselves.
        packed: Streams follow each other within a window.
        sources: How many sources there are.
        num_workers: Number of worker processes; 0 reads in the trainer's.
        prefetch_factor: Batches that workers read ahead.
        threads_per_worker: How many threads a worker has.
    """

    lanes: int
    time_steps: int | None
    packed: bool
    sources: int
    num_workers: int
    prefetch_factor: int
    threads_per_worker: int = 1


class Busy(NamedTuple):
    """Seconds that a worker spent, see `WorkerStats`."""

    reading: float
    opening: float
    granting: float
    idle: float
    ahead: float

    @property
    def share(self) -> float:
        """How much of its time it read or opened, 0 to 1."""
        total = self.reading + self.opening + self.granting + self.idle
        return (self.reading + self.opening) / total if total > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What advice follows from, see `LoaderStats`; counts are those of the batches handed out.

    Attributes:
        cores: How many cores may be used.
    """

    setup: Setup
    batches: int
    begun: int
    items: int
    cells: int
    bytes: int
    sent: int
    wait_share: float
    padding_share: float
    workers: tuple[Busy, ...]
    cores: int


def advise(figures: Figures) -> Advice:
    """The advice that follows from figures: about what costs most."""
    if figures.batches < 2:
        return Advice("unknown", f"Too few batches to tell anything from ({figures.batches}): read more.")
    if figures.padding_share >= _MUCH_PADDING:
        return _about_padding(figures)
    if figures.wait_share < _LONG_WAIT:
        return Advice(
            "nothing",
            f"The trainer is slower than the loader, and waits {figures.wait_share:.0%} of its time: there is nothing "
            "to gain here.",
        )
    # without workers the trainer waits while it reads
    busy = max((worker.share for worker in figures.workers), default=0.0) if figures.setup.num_workers else 1.0
    if _is_tiny(figures):
        return Advice(
            "larger windows",
            f"A lane's window is {figures.bytes / _windows(figures):,.0f} bytes, so time goes into keeping account of "
            "windows: make them larger (time_steps), or yield chunks of several steps as items.",
        )
    if busy >= _BUSY:
        return _about_busy_workers(figures)
    return _about_idle_workers(figures)


def _about_padding(figures: Figures) -> Advice:
    setup, told = figures.setup, f"{figures.padding_share:.0%} of the batches is padding"
    if 0 < setup.sources < setup.lanes:
        return Advice(
            "fewer lanes",
            f"{told}, as {setup.sources} sources cannot fill {setup.lanes} lanes: use fewer lanes "
            f"(batch_size={setup.sources}), or cut the sources into sections (sections=).",
        )
    if _window_padding(figures) >= 0.5 * figures.padding_share:
        return Advice(
            "packed windows",
            f'{told}, behind streams that end within a window: use windows="packed", or smaller windows (time_steps).',
        )
    return Advice(
        "sections",
        f"{told}, as lanes run out of sources while others still read long ones: cut these into sections (sections=), "
        'or have them come first (schedule="longest_first", with lengths).',
    )


def _window_padding(figures: Figures) -> float:
    """How much of the batches is about what pads the last windows of streams."""
    time_steps = figures.setup.time_steps
    if time_steps is None or figures.setup.packed or not (figures.begun and figures.cells):
        return 0.0
    length = figures.items / figures.begun
    padding = time_steps - length if length < time_steps else (time_steps - 1) / 2
    return figures.begun * padding / figures.cells


def _windows(figures: Figures) -> int:
    return figures.batches * figures.setup.lanes


def _is_tiny(figures: Figures) -> bool:
    """Whether a lane's window is read in next to no time, and is small."""
    seconds = sum(worker.reading + worker.opening for worker in figures.workers)
    windows = _windows(figures)
    arrays = figures.bytes > 0  # else they are objects, which are sent
    return arrays and seconds < _TINY_SECONDS * windows and figures.bytes < _TINY_BYTES * windows


def _about_busy_workers(figures: Figures) -> Advice:
    setup = figures.setup
    most = min(setup.lanes, figures.cores)
    reading = sum(worker.reading for worker in figures.workers)
    opening = sum(worker.opening for worker in figures.workers)
    waits = f"The trainer waits {figures.wait_share:.0%} of its time"
    if setup.num_workers * setup.threads_per_worker < most:
        who = ("nobody reads meanwhile", "the worker reads all the time")[setup.num_workers > 0]
        if setup.num_workers > 1:
            who = f"{setup.num_workers} workers read all the time"
        return Advice(
            "workers",
            f"{waits}, and {who}: use more workers (num_workers={-(-most // setup.threads_per_worker)}).",
        )
    if opening > reading:
        ahead = any(worker.ahead > 0 for worker in figures.workers)
        remedy = (
            "reserve more of them ahead (lookahead=2)"
            if ahead
            else "have them opened ahead (open_early=True, if the factory may run in a second thread)"
        )
        return Advice("open ahead", f"{waits}, and workers open streams more than they read: {remedy}.")
    if setup.lanes < figures.cores:
        return Advice(
            "more lanes",
            f"{waits}, and each of the {setup.lanes} lanes has a worker, of {figures.cores} cores: use more lanes "
            "(batch_size), or pack what is decoded (stores.pack).",
        )
    speed = figures.bytes / (reading + opening) if reading + opening > 0 else 0.0
    if speed > _FROM_MEMORY:
        return Advice(
            "smaller items",
            f"{waits}, and a worker reads {speed / 1e6:,.0f} MB/s, about the speed of memory: make items smaller "
            "(size, dtype).",
        )
    return Advice(
        "pack",
        f"{waits}, and workers keep all {figures.cores} cores busy: decode once and pack it (stores.pack, or "
        "`stream-dataloader pack`), or make items smaller.",
    )


def _about_idle_workers(figures: Figures) -> Advice:
    setup = figures.setup
    waits = f"The trainer waits {figures.wait_share:.0%} of its time, and workers are idle"
    if figures.sent > 0.5 * figures.batches * setup.num_workers * setup.threads_per_worker:
        return Advice(
            "arrays",
            f"{waits}: {figures.sent} parts of batches travelled through torch's queue, not through shared memory; "
            "yield arrays of one shape and dtype, not objects.",
        )
    total = sum(worker.reading + worker.opening + worker.granting + worker.idle for worker in figures.workers)
    granting = sum(worker.granting for worker in figures.workers)
    if granting > _MUCH_GRANTING * total:
        return Advice(
            "lookahead",
            f"The trainer waits {figures.wait_share:.0%} of its time, and workers wait for each other "
            f"{granting / total:.0%} of theirs: reserve more sources (lookahead=), or use deterministic=False.",
        )
    return Advice(
        "prefetch",
        f"{waits} in between, as some batches take much longer than others: read more of them ahead "
        f"(prefetch_factor={4 * setup.prefetch_factor}).",
    )


def available_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
