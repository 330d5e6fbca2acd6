"""What packing tells: its progress, a report, and that the disk will not do."""

from __future__ import annotations

import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from stream_dataloader.errors import StreamError
from stream_dataloader.stores._base.files import disk_bytes
from stream_dataloader.stores._packing.partial import Partial

__all__ = ["Bar", "PackReport", "Progress", "size_text"]

LOOKED_SECONDS = 2.0


@dataclass(frozen=True)
class PackReport:
    """What `stores.pack` has packed.

    Attributes:
        path: The store.
        format: Its format.
        streams: How many streams it holds.
        steps: Their time steps, all together.
        bytes: What the store's files take.
        seconds: How long this run took.
        packed_before: Streams that an interrupted run had packed.
        skipped: Why streams were left out, in the order of their sources.
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
        return "\n".join(lines + [f"skipped {error}" for error in self.skipped])


def size_text(size: float) -> str:
    """A number of bytes, as people write it."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


class Bar(tqdm):  # type: ignore[misc]
    """A bar that shares nothing with other processes."""

    monitor_interval = 0  # no thread, which does not go together with forking
    _lock = threading.RLock()  # not one of all processes


class Progress:
    """How far packing is."""

    def __init__(
        self, shown: bool | Callable[[int, int], Any] | None, partial: Partial, done: Iterable[int], total: int
    ) -> None:
        self._partial, self._total = partial, total
        self._done = set(done)
        self._before, self._used_before = len(self._done), disk_bytes(partial.store)
        self._call = shown if callable(shown) else None
        quiet = None if shown is None else not shown or self._call is not None
        name = f"packing {os.path.basename(partial.path)}"
        self._bar = Bar(desc=name, initial=self._before, total=total, unit="stream", disable=quiet)
        self._steps = 0
        self._looked = 0.0
        self._has_warned = False

    def done(self, number: int, steps: int = 0) -> None:
        """A stream is packed, or skipped; said again where a worker died."""
        if number in self._done:
            return
        self._done.add(number)
        self._steps += steps
        self._bar.update()
        if self._call is not None:
            self._call(len(self._done), self._total)

    def look(self) -> None:
        """Now and then, show how fast it is, and warn if the disk seems too small."""
        done = len(self._done) - self._before
        if not done or time.monotonic() - self._looked < LOOKED_SECONDS:
            return
        self._looked = time.monotonic()
        used = disk_bytes(self._partial.store) - self._used_before
        if not self._bar.disable:
            seconds = max(self._bar.format_dict["elapsed"], 1e-3)
            self._bar.set_postfix_str(f"{self._steps / seconds:,.0f} steps/s, {size_text(used / seconds)}/s")
        wanted = used * (self._total - len(self._done)) // done
        free = shutil.disk_usage(self._partial.folder).free
        if wanted > free and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the streams that are left take about {size_text(wanted)}, and the disk of "
                f"{self._partial.folder} has {size_text(free)} free",
                RuntimeWarning,
                stacklevel=2,
            )

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.refresh()
        self._bar.close()
