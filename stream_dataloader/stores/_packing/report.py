"""What packing came to, and how far it is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from stream_dataloader.errors import StreamError

__all__ = ["Bar", "PackReport", "Progress", "size_text"]


@dataclass(frozen=True)
class PackReport:
    """What `stores.pack` has packed.

    Attributes:
        path: The store.
        format: Its format.
        streams: How many streams it holds.
        steps: Their time steps, all together.
        bytes: What the store takes on the disk.
        seconds: How long this run took.
        packed_before: Streams that an earlier run, which was interrupted, had packed.
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
    """A bar that shares nothing with other processes.

    tqdm's own lock is for all processes: one that was killed while it held it would have this one wait without end. And
    tqdm keeps a thread for bars that move seldom, which does not go together with forking.
    """

    monitor_interval = 0
    _lock = threading.RLock()


class Progress:
    """Shows how far packing is: a bar with the rate and the time left, or a call of the user's.

    Args:
        shown: See `pack`.
        name: What is packed.
        done: How many streams an earlier run has packed.
        total: How many there are.
    """

    def __init__(self, shown: bool | Callable[[int, int], Any] | None, name: str, done: int, total: int) -> None:
        self._call = shown if callable(shown) else None
        quiet = None if shown is None else not shown or self._call is not None
        self._bar = Bar(desc=f"packing {name}", initial=done, total=total, unit="stream", disable=quiet)
        self._done, self._total = done, total
        self._steps = self._bytes = 0

    def read(self, steps: int, size: int) -> None:
        """So many more steps were read, of so many bytes."""
        self._steps += steps
        self._bytes += size
        if not self._bar.disable:
            seconds = max(self._bar.format_dict["elapsed"], 1e-3)
            self._bar.set_postfix_str(
                f"{self._steps / seconds:,.0f} steps/s, {size_text(self._bytes / seconds)}/s", refresh=False
            )
            self._bar.update(0)

    def finished(self) -> None:
        """One more stream is done: packed, or skipped."""
        self._done += 1
        self._bar.update()
        if self._call is not None:
            self._call(self._done, self._total)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.refresh()
        self._bar.close()
