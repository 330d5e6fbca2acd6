"""`ReadingPlan`: what is read and how, as one plain value, which a `StreamDataset` makes and this room follows.

Guarantee: it does nothing by itself, and can be pickled if what the user gave can.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stream_dataloader._reading.lists import SourceLists
from stream_dataloader._schedule.rules import Rules
from stream_dataloader._schedule.sections import Cuts, Lengths, Section
from stream_dataloader.errors import StreamError
from stream_dataloader.protocols import OnError


@dataclass(frozen=True)
class ReadingPlan:
    """What is read, and how: what the options of a `StreamDataset` come to.

    Attributes:
        rules: Who reads what and when.
        lists: The sources, and what opens them.
        fill_value: Pads what no item is read for.
        on_error: Decides whether an error ends the epoch or the stream.
        retries: How often in a row a stream that breaks is opened again.
        retry_on: For which exceptions.
        mark_ends: Whether streams' last steps are marked.
        cuts: The sections that sources are cut into; None if they are read whole. What the schedule then numbers is
            sections, not sources.
    """

    rules: Rules
    lists: SourceLists
    fill_value: Any
    on_error: OnError
    retries: int
    retry_on: tuple[type[Exception], ...]
    mark_ends: bool = False
    cuts: Cuts | None = None

    @property
    def scheduled_lengths(self) -> Lengths | None:
        """The number of items of what the schedule hands out, sources or sections, if that is known."""
        return self.lists.lengths if self.cuts is None else self.cuts

    def section(self, number: int, epoch: int) -> Section:
        """What the schedule hands out by a number: a section, or a whole source, which may end nobody knows where."""
        if self.cuts is not None:
            return self.cuts.section(number, epoch)
        lengths = self.lists.lengths
        return Section(number, 0, -1 if lengths is None else int(lengths[number]), ends=True)

    def skips(self, error: StreamError) -> bool:
        """Whether a lane goes on with its next source after an error."""
        answer = self.on_error(error) if callable(self.on_error) else self.on_error
        return answer == "skip"
