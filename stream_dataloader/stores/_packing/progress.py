"""Shows how far packing is: a bar with the rate and the time left, or a call of the user's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from stream_dataloader.stores._packing.report import size_text

__all__ = ["Bar", "Progress"]


class Bar(tqdm):  # type: ignore[misc]
    """A bar that shares nothing with other processes.

    tqdm's own lock is for all processes: one that was killed while it held it would have this one wait without end. And
    tqdm keeps a thread for bars that move seldom, which does not go together with forking.
    """

    monitor_interval = 0
    _lock = threading.RLock()


class Progress:
    """How far packing is.

    Args:
        shown: True shows a bar on stderr, None does if that is a terminal, False is quiet. Or a function that is called
            with how many streams are done, and how many there are.
        name: What is packed.
        done: How many streams an earlier run has packed.
        total: How many there are.
    """

    def __init__(self, shown: bool | Callable[[int, int], Any] | None, name: str, done: int, total: int) -> None:
        self._call = shown if callable(shown) else None
        quiet = None if shown is None else not shown or self._call is not None
        self._bar = Bar(desc=f"packing {name}", initial=done, total=total, unit="stream", disable=quiet)
        self._done, self._total = done, total
        self.steps = self.bytes = 0

    def read(self, steps: int, size: int) -> None:
        """So many more steps were read, of so many bytes."""
        self.steps += steps
        self.bytes += size
        if not self._bar.disable:
            seconds = max(self._bar.format_dict["elapsed"], 1e-3)
            self._bar.set_postfix_str(
                f"{self.steps / seconds:,.0f} steps/s, {size_text(self.bytes / seconds)}/s", refresh=False
            )
            self._bar.update(0)
            self._bar.refresh()

    def finished(self) -> None:
        """One more stream is done: packed, or skipped."""
        self._done += 1
        self._bar.update()
        if self._call is not None:
            self._call(self._done, self._total)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()
