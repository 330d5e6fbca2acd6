"""One run of packing: a loader whose workers write, its progress, and a report.

Guarantee: a warning comes before the disk is full.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any, Literal

from tqdm import tqdm

from stream_dataloader._engine.schedule.sections import Cuts, Section
from stream_dataloader.dataloader import StreamDataLoader
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import ErrorReport, StoreError, StreamError, shown
from stream_dataloader.stores._base.files import disk_bytes
from stream_dataloader.stores._packing.part import StreamPacker
from stream_dataloader.stores._packing.partial import Partial, packed_in

__all__ = ["Bar", "ErrorChoice", "PackReport", "Run", "size_text"]

LOOKED_SECONDS = 2.0

#: Number of messages that a worker may be ahead of another.
_AHEAD = 64
_MOST_RESTARTS = 8

ErrorChoice = Literal["raise", "skip"]


@dataclass(frozen=True)
class PackReport:
    """Report of `stores.pack`.

    Attributes:
        path: Path of the store.
        format: Format of the store.
        streams: Number of streams in the store.
        steps: Number of time steps of all streams.
        bytes: Size of the store's files.
        seconds: Duration of this run.
        packed_before: Number of streams that interrupted runs had packed.
        skipped: Errors of the streams that were left out, in the order of their sources.
    """

    path: str
    format: str
    streams: int
    steps: int
    bytes: int
    seconds: float
    packed_before: int = 0
    skipped: tuple[StreamError, ...] = ()

    def __str__(self) -> str:
        before = f", {self.packed_before:,} of them before" if self.packed_before else ""
        lines = [
            f"packed {self.streams:,} streams{before}, {self.steps:,} steps, {size_text(self.bytes)}, in "
            f"{self.seconds:.1f} s into {self.path} ({self.format})"
        ]
        return "\n".join(lines + [f"skipped {shown(error)}" for error in self.skipped])


def size_text(size: float) -> str:
    """Format a number of bytes."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


class Bar(tqdm):  # type: ignore[misc]
    """Progress bar that shares nothing with other processes."""

    monitor_interval = 0  # no thread, because threads and forking do not go together
    _lock = threading.RLock()  # tqdm's own lock is shared by all processes

    @classmethod
    def of(cls, path: str, total: int, progress: bool | Callable[[int, int], Any] | None, done: int = 0) -> Bar:
        """Return the bar for packing to a path; `progress` as for `pack`."""
        quiet = None if progress is None else not progress or callable(progress)
        if sys.stderr is None:  # the program was started without it
            quiet = True
        return cls(desc=f"packing {os.path.basename(path)}", initial=done, total=total, unit="stream", disable=quiet)


class Run:
    """Run of packing: a loader opens the streams that are not packed, and its workers write them.

    Attributes:
        skipped: Errors of the streams that were left out, by number.
    """

    def __init__(
        self,
        factory: StreamPacker,
        on_error: ErrorChoice | Callable[[StreamError], ErrorChoice],
        shown: bool | Callable[[int, int], Any] | None,
        partial: Partial,
        own: range,
    ) -> None:
        """Pack the sources with the numbers `own`."""
        self._factory, self._on_error, self._partial, self._own = factory, on_error, partial, own
        self.skipped: dict[int, StreamError] = {}
        self._done = set(packed_in(partial.journal)[0])
        self.before, self._used_before = len(self._done), disk_bytes(partial.store)
        self._call = shown if callable(shown) else None
        self._bar = Bar.of(partial.path, len(own), shown, self.before)
        self._steps = 0
        self._looked = 0.0
        self._has_warned = False

    def pack(self, num_workers: int, seed: int, context: BaseContext | str | None) -> None:
        factory, before = self._factory, -1
        lists = factory.lists
        while left := sorted({*self._own} - packed_in(factory.journal)[0].keys() - self.skipped.keys()):
            if len(left) == before:
                raise StoreError(f"workers died before the disk held one of {len(left):,} streams")
            # again if a worker died before its streams were on the disk
            before, workers = len(left), min(num_workers, len(left))
            dataset = StreamDataset(
                list(lists) if lists.mix else lists.sources,
                factory,
                max(1, workers),
                seed=seed,
                deterministic=False,
                on_error="skip" if callable(self._on_error) else self._on_error,
                fingerprint="packed",
            )
            dataset._cuts = _Chosen(left)
            dataset = dataset._under(dataclasses.replace(dataset._rules, num_sources=len(left)))
            options: dict[str, Any] = {}
            if workers:
                options = {
                    "prefetch_factor": _AHEAD,
                    "persistent_workers": True,
                    "multiprocessing_context": context,
                    "max_restarts": _MOST_RESTARTS,
                }
            loader = StreamDataLoader(dataset, workers, list, rank=0, world_size=1, **options)
            try:
                self._read(loader)
            finally:
                loader._stop_workers()
                factory.close()

    def _read(self, loader: StreamDataLoader[Any]) -> None:
        decided = 0
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "skipped the rest of a stream", RuntimeWarning)
            for reports in _reports_of(loader):
                for failure in loader.failures[decided:]:
                    self._decide(failure)
                decided = len(loader.failures)
                for report in reports:
                    if isinstance(report, ErrorReport):
                        raise report.unpack()
                    for number, steps in report or ():
                        self._count(number, steps)
                self._look()

    def _decide(self, error: StreamError) -> None:
        choice = self._on_error(error) if callable(self._on_error) else self._on_error
        if choice == "raise":
            raise error
        if choice != "skip":
            raise ValueError(f"on_error returned {choice!r} for {error}; return 'raise' or 'skip'")
        self.skipped[error.source_index] = error
        self._count(error.source_index)

    def _count(self, number: int, steps: int = 0) -> None:
        """Count a stream as packed or skipped, unless it was counted before."""
        if number in self._done:
            return
        self._done.add(number)
        self._steps += steps
        self._bar.update()
        if self._call is not None:
            self._call(len(self._done), self._bar.total)

    def _look(self) -> None:
        """Now and then, show the speed and check the free space of the disk."""
        done = len(self._done) - self.before
        if not done or time.monotonic() - self._looked < LOOKED_SECONDS:
            return
        self._looked = time.monotonic()
        used = disk_bytes(self._partial.store) - self._used_before
        if not self._bar.disable:
            seconds = max(self._bar.format_dict["elapsed"], 1e-3)
            self._bar.set_postfix_str(f"{self._steps / seconds:,.0f} steps/s, {size_text(used / seconds)}/s")
        wanted = used * (self._bar.total - len(self._done)) // done
        free = shutil.disk_usage(self._partial.folder).free
        if wanted > free and not self._has_warned:
            self._has_warned = True
            what = f"the streams that are left take about {size_text(wanted)}"
            warnings.warn(f"{what}, and the disk of {self._partial.folder} has {size_text(free)} free", RuntimeWarning)

    def close(self) -> None:
        self._bar.refresh()
        self._bar.close()


class _Chosen(Cuts):
    """Some of the sources, read whole, in place of the sections of all. They keep their numbers."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers

    def under(self, seed: int) -> Cuts:  # noqa: ARG002
        """See `Cuts`."""
        return self

    def __len__(self) -> int:
        return len(self._numbers)

    def source(self, number: int) -> int:
        """See `Cuts`."""
        return self._numbers[number]

    def section(self, number: int, epoch: int) -> Section:  # noqa: ARG002
        """See `Cuts`."""
        return Section(self._numbers[number], 0, -1, -1)

    def __reduce__(self) -> Any:
        return _Chosen, (self._numbers,)


def _reports_of(loader: StreamDataLoader[Any]) -> Iterator[list[Any]]:
    yield from loader
    # the second epoch finishes the parts, because each worker begins a stream
    yield next(iter(loader))
