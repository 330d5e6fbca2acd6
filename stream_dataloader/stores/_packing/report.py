"""What packing came to, how far it is, and whether the disk will do.

Guarantee: a disk that is too small for streams of known lengths is an error before it is full; of others, a warning
tells.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from stream_dataloader.errors import StreamError
from stream_dataloader.stores._packing.folder import PartialFolder

__all__ = ["Bar", "PackReport", "Progress", "disk_bytes", "size_text"]

LOOKED_SECONDS = 2.0


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
    """A bar that shares nothing with other processes."""

    monitor_interval = 0  # no thread, which does not go together with forking
    _lock = threading.RLock()  # not one of all processes, of which one may be killed with it


def disk_bytes(folder: str) -> int:
    """What the files in a folder take on the disk; files that vanish meanwhile count nothing."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += 512 * os.stat(os.path.join(place, name)).st_blocks
            except FileNotFoundError:
                continue
    return total


class Progress:
    """How far packing is: a bar with the rate and the time left, or a call of the user's, and a look at the disk.

    Args:
        shown: See `pack`.
        folder: Where it is packed.
        done: How many streams an earlier run has packed.
        total: How many there are.
        steps: Time steps of the streams that are left; None if their number is not known.
    """

    def __init__(
        self,
        shown: bool | Callable[[int, int], Any] | None,
        folder: PartialFolder,
        done: int,
        total: int,
        steps: int | None,
    ) -> None:
        self._folder = folder
        self._call = shown if callable(shown) else None
        quiet = None if shown is None else not shown or self._call is not None
        name = f"packing {os.path.basename(folder.path)}"
        self._bar = Bar(desc=name, initial=done, total=total, unit="stream", disable=quiet)
        self._done, self._to_do, self._total = done, total - done, total
        self._steps_to_do = steps
        self._streams = self._steps = self._bytes = 0  # that were packed
        self._used_before = disk_bytes(folder.store)
        self._looked = 0.0
        self._has_warned = False

    def packed(self, steps: int, size: int) -> None:
        """One more stream is packed, of so many steps, which are so many bytes."""
        self._streams += 1
        self._steps += steps
        self._bytes += size
        if not self._bar.disable:
            seconds = max(self._bar.format_dict["elapsed"], 1e-3)
            rates = f"{self._steps / seconds:,.0f} steps/s, {size_text(self._bytes / seconds)}/s"
            self._bar.set_postfix_str(rates, refresh=False)
        self.finished()

    def finished(self) -> None:
        """One more stream is done: packed, or skipped."""
        self._done += 1
        self._bar.update()
        if self._call is not None:
            self._call(self._done, self._total)

    def look(self) -> None:
        """Look at the disk, if the last time was a while ago, and warn if it seems too small.

        Raises:
            OSError: It is too small, as lengths that are known tell.
        """
        if time.monotonic() - self._looked < LOOKED_SECONDS:
            return
        self._looked = time.monotonic()
        used = disk_bytes(self._folder.store) - self._used_before
        done, to_do = (self._streams, self._to_do) if self._steps_to_do is None else (self._steps, self._steps_to_do)
        if not done or (wanted := used * (to_do - done) // done) <= (free := self._folder.free_bytes()):
            return
        text = (
            f"the streams that are left take about {size_text(wanted)}, and the disk of {self._folder.partial} has "
            f"{size_text(free)} free"
        )
        if self._steps_to_do is not None:
            raise OSError(errno.ENOSPC, text)
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"{text}; free some of it while it goes on", RuntimeWarning, stacklevel=2)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.refresh()
        self._bar.close()
