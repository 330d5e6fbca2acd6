"""`ReadingPlan`: what is read and how, as one plain value, which a `StreamDataset` makes and this room follows.

Guarantee: it does nothing by itself, and can be pickled if what the user gave can.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stream_dataloader._schedule.rules import IntArray, Rules
from stream_dataloader._schedule.sections import Cuts, Lengths
from stream_dataloader.errors import StreamError
from stream_dataloader.protocols import OnError, StreamFactory


@dataclass(frozen=True)
class Opening:
    """How the sources of one list are opened.

    Attributes:
        factory: Opens one of them.
        early_in_workers: Whether a background thread of a worker may open them ahead of need.
        early_locally: The same in the main process.
    """

    factory: StreamFactory
    early_in_workers: bool
    early_locally: bool


@dataclass(frozen=True)
class ReadingPlan:
    """What is read, and how: what the options of a `StreamDataset` come to.

    Attributes:
        rules: Who reads what and when.
        sources: All sources.
        openings: How they are opened, one a list that `rules.mix` draws from; one in all if there is no mix.
        list_starts: The index of each list's first source.
        lengths: `(num_sources,)`, number of items of each source, -1 where it is unknown; None if all are.
        fill_value: Pads what no item is read for.
        on_error: Decides whether an error ends the epoch or the stream.
        retries: How often in a row a stream that breaks is opened again.
        mark_ends: Whether streams' last steps are marked.
        cuts: The sections that sources are cut into; None if they are read whole. What the schedule then numbers is
            sections, not sources.
    """

    rules: Rules
    sources: Sequence[Any]
    openings: tuple[Opening, ...]
    list_starts: tuple[int, ...]
    lengths: IntArray | None
    fill_value: Any
    on_error: OnError
    retries: int
    mark_ends: bool = False
    cuts: Cuts | None = None

    @property
    def scheduled_lengths(self) -> Lengths | None:
        """The number of items of what the schedule hands out, sources or sections, if that is known."""
        return self.lengths if self.cuts is None else self.cuts

    def opening(self, index: int) -> Opening:
        """How a source is opened, by its index."""
        return self.openings[self._list_of(index)]

    def early(self, *, locally: bool) -> Callable[[int], bool] | None:
        """Whether a background thread may open a source ahead of need, by its index; None if none of them.

        Args:
            locally: In the main process, where only what was asked for runs in a thread.
        """
        allowed = [opening.early_locally if locally else opening.early_in_workers for opening in self.openings]
        return (lambda index: allowed[self._list_of(index)]) if any(allowed) else None

    def _list_of(self, index: int) -> int:
        return bisect_right(self.list_starts, index) - 1

    def skips(self, error: StreamError) -> bool:
        """Whether a lane goes on with its next source after an error."""
        answer = self.on_error(error) if callable(self.on_error) else self.on_error
        return answer == "skip"
