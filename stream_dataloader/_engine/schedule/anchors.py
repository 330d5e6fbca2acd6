"""The items that are read of each source if only every n-th is: pure functions of (seed, epoch, source).

::

    every = 4, a source of 11 items       phase 2         phase 2, first and last       phase 2, ahead = 5
    0 1 2 3 4 5 6 7 8 9 10               2 6 10          0 2 6 10                      2 6

Guarantee: as sections, anchors have known numbers in each epoch, so schedules, lengths and states need nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from stream_dataloader._engine.schedule.rules import IntArray
from stream_dataloader._engine.schedule.sections import Cut, offsets_of

_KEPT_SOURCES = 4096


class Spacing(NamedTuple):
    """Which items are anchors.

    Attributes:
        every: Distance between anchors.
        phase: The first of them; None: drawn from 0 to `every - 1`, in each epoch.
        first: Whether item 0 is one, too.
        last: Whether the last item that is allowed is one, too.
        ahead: Number of items that there must be from an anchor on, itself included.
    """

    every: int
    phase: int | None
    first: bool
    last: bool
    ahead: int

    def __repr__(self) -> str:
        given = [] if self.phase is None else [f"phase={self.phase}"]
        given += [f"{name}=True" for name in ("first", "last") if getattr(self, name)]
        given += [] if self.ahead == 1 else [f"ahead={self.ahead}"]
        return f"Anchors({', '.join([str(self.every), *given])})"


class AnchorCut(Cut):
    """The anchors of a list of sources: each source is one section, and the items of it are its anchors.

    Args:
        lengths: `(sources,)`, items of each source.
        spacing: Which of them are anchors.
        first: The index of the list's first source, among those of all lists.
        key: The number of that source in random draws; None: its index.
    """

    skips = True

    def __init__(self, lengths: IntArray, spacing: Spacing, first: int = 0, key: int | None = None) -> None:
        super().__init__(lengths, None, jitter=False, first=first, key=key)
        self.spacing = spacing

    def _parts(self, sources: IntArray, key: int) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
        """Return the items allowed, the phases, the numbers of spaced anchors, and those added before and behind."""
        every, phase, first, last, ahead = self.spacing
        # An anchor must have `ahead` items from itself on, so the last items of a source cannot be anchors.
        allowed = np.maximum(self.lengths[sources] - (ahead - 1), 0)
        drawn = phase is None
        phases = offsets_of(key, sources + self._key, every) - 1 if drawn else np.full_like(sources, phase)
        spaced = np.maximum(-(-(allowed - phases) // every), 0)
        # Item 0, and the last one, are added only where no spaced anchor is there: none may come twice.
        before = (first & (allowed > 0) & (phases > 0)).astype(np.int64)
        end = np.where(spaced > 0, phases + (spaced - 1) * every, np.where(before > 0, 0, -1))
        behind = (last & (end < allowed - 1)).astype(np.int64)
        return allowed, phases, spaced, before, behind

    def bounds(self, sources: IntArray, places: IntArray, key: int) -> tuple[IntArray, IntArray]:
        """Return zeros, and the numbers of anchors of some sources, see `Cut`."""
        _, _, spaced, before, behind = self._parts(sources, key)
        counts: IntArray = spaced + before + behind
        return np.zeros_like(places), counts

    def items(self, source: int, key: int) -> IntArray:
        """Return the items of a source that are anchors, in order."""
        return self._known(source, key)

    @cached_property
    def _known(self) -> Callable[[int, int], IntArray]:
        return lru_cache(_KEPT_SOURCES)(self._items_of)

    def _items_of(self, source: int, key: int) -> IntArray:
        allowed, phase, spaced, before, behind = (int(part[0]) for part in self._parts(np.array([source]), key))
        found = [0] * before + list(range(phase, phase + spaced * self.spacing.every, self.spacing.every))
        return np.array(found + [allowed - 1] * behind, np.int64)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_known"}
