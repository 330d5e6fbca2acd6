"""A progress bar over an epoch: exact batches where their number is known, else sources done.

Guarantee: what is iterated is the loader's own iterator; the bar only looks at its counts, at most ten times a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from stream_dataloader.stats import LoaderStats

__all__ = ["ProgressBar"]

Batch = TypeVar("Batch")


class ProgressBar(Generic[Batch]):
    """Iterates over a loader's epoch, and shows how far it is. Quiet where there is no terminal.

    Args:
        total: How many batches there are; None if that is not known.
        sources: How many sources there are; None if the epoch does not end.
        options: Of tqdm, which win over those set here.
    """

    def __init__(
        self,
        batches: Iterator[Batch],
        stats: Callable[[], LoaderStats],
        total: int | None,
        sources: int | None,
        lanes: int,
        options: dict[str, Any],
    ) -> None:
        from tqdm.auto import tqdm  # here, as in a notebook it warns of what it misses

        self._batches = batches
        self._stats = stats
        self._by_batches = total is not None or sources is None
        self._lanes = lanes
        self._next_look = 0.0
        given = {"total": total if self._by_batches else sources, "unit": "batch" if self._by_batches else "source"}
        self._bar = tqdm(**({"disable": None, "dynamic_ncols": True} | given | options))

    def __iter__(self) -> Iterator[Batch]:
        begin = self._stats()
        with self._bar as bar:
            for batch in self._batches:
                yield batch
                if not bar.disable:
                    self._show(begin)
            if not (self._by_batches or bar.disable):
                bar.update(bar.total - bar.n)

    def _show(self, begin: LoaderStats) -> None:
        """Move the bar on; counts are looked at when it is drawn."""
        bar = self._bar
        if self._by_batches:
            if bar.update(1):
                self._tell(self._stats() - begin)
        elif time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + bar.mininterval
            since = self._stats() - begin
            done = max(since.begun - self._lanes, 0)  # those that lanes read now are not done
            self._tell(since)
            bar.update(min(done, bar.total) - bar.n)

    def _tell(self, since: LoaderStats) -> None:
        text = f"{since.items_per_second:,.0f} items/s, padding {since.padding_share:.1%}"
        self._bar.set_postfix_str(text, refresh=False)
