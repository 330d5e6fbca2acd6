"""The items that are read of each group if only every n-th is: pure functions of (seed, epoch, group).

::

    every = 4, a group of 11 items       phase 2         phase 2, first and last       phase 2, ahead = 5
    0 1 2 3 4 5 6 7 8 9 10               2 6 10          0 2 6 10                      2 6

Guarantee: as sections, anchors have known numbers in each epoch, so schedules, lengths and states need nothing else.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from stream_dataloader._engine.schedule.rules import IntArray
from stream_dataloader._engine.schedule.sections import Cut, Cuts, Section, offsets_of

_KEPT_GROUPS = 4096


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


class AnchorCuts(Cuts):
    """The anchors of groups, with the interface of sections: unit n is group n, and its items are its anchors.

    Args:
        lengths: `(groups,)`, number of items of each group.
    """

    def __init__(self, lengths: IntArray, spacing: Spacing, seed: int) -> None:
        self._items, self._spacing = lengths, spacing
        super().__init__([Cut(lengths, None, jitter=False)], seed)

    def _make_cache(self) -> None:
        super()._make_cache()
        self._known = lru_cache(_KEPT_GROUPS)(self._items_of)

    def _phases(self, groups: IntArray, epoch: int) -> IntArray:
        every, phase = self._spacing.every, self._spacing.phase
        if phase is not None:
            return np.full_like(groups, phase)
        return offsets_of(self._key(epoch), groups, every) - 1

    def _parts(self, groups: IntArray, epoch: int) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
        """Return the items allowed, the phases, the numbers of spaced anchors, and those added before and behind."""
        every, _, first, last, ahead = self._spacing
        allowed = np.maximum(self._items[groups] - (ahead - 1), 0)
        phases = self._phases(groups, epoch)
        spaced = np.maximum(-(-(allowed - phases) // every), 0)
        before = (first & (allowed > 0) & (phases > 0)).astype(np.int64)
        end = np.where(spaced > 0, phases + (spaced - 1) * every, np.where(before > 0, 0, -1))
        behind = (last & (end < allowed - 1)).astype(np.int64)
        return allowed, phases, spaced, before, behind

    def _all_lengths(self, epoch: int) -> IntArray:
        _, _, spaced, before, behind = self._parts(np.arange(len(self._items)), epoch)
        counts: IntArray = spaced + before + behind
        return counts

    def section(self, number: int, epoch: int) -> Section:
        """Return the anchors of a group as a stream of their own."""
        count = len(self.items(number, epoch))
        return Section(number, 0, count, count)

    def items(self, group: int, epoch: int) -> IntArray:
        """Return the items of a group that are anchors, in order."""
        return self._known(group, epoch)

    def _items_of(self, group: int, epoch: int) -> IntArray:
        parts = self._parts(np.array([group]), epoch)
        allowed, phase, spaced, before, behind = (int(part[0]) for part in parts)
        found = [0] * before + list(range(phase, phase + spaced * self._spacing.every, self._spacing.every))
        return np.array(found + [allowed - 1] * behind, np.int64)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in super().__getstate__().items() if name != "_known"}
