"""The sections that sources are cut into: pure functions of (seed, epoch, source), no torch, clock or lock.

::

    steps = 4, a source of 10 items             numbers of the sections       first = 3: 4 numbers for 10 items
    jitter=False   0 1 2 3|4 5 6 7|8 9          3 4 5
    jitter=True    0|1 2 3 4|5 6 7 8|9          3 4 5 6                       the first has 1, 2, 3 or 4 items
                   0 1 2|3 4 5 6|7 8 9|         3 4 5 (6 is empty)            with equal chance

The schedule hands out sections by number; a source has the same numbers in every epoch.

Guarantee: in each epoch every item of a source is in exactly one section, and no section has more than `steps` items.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache, partial
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from stream_dataloader._engine.schedule.rules import IntArray
from stream_dataloader.stream_info import cuts_key

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio: what SplitMix64 counts by


class Section(NamedTuple):
    """Items `[start, stop)` of a source.

    Attributes:
        source: Its index.
        start: The first item.
        stop: Behind the last item; -1: the source's end, which is not known.
        length: Number of the source's items; -1 if it is not known.
    """

    source: int
    start: int
    stop: int
    length: int

    @property
    def ends(self) -> bool:
        """Whether the source ends with this section; an empty section counts only if the source itself is empty."""
        return self.stop == self.length and (self.start != self.stop or not self.length)


class Cut:
    """Cut of one list of sources into sections.

    Args:
        lengths: `(sources,)`, items of each source; a source of unknown length (-1) is not cut.
        steps: The most items of a section; None: sources stay whole.
        jitter: Draw the cuts anew in each epoch.
        first: The index of the list's first source, among those of all lists.
        key: The number of that source in random draws, see `source_key`; None: its index.

    Attributes:
        skips: Whether a section leaves out items of its source; see `AnchorCut`.
    """

    skips = False

    def __init__(
        self, lengths: IntArray, steps: int | None, *, jitter: bool, first: int = 0, key: int | None = None
    ) -> None:
        self.lengths, self.steps, self.jitter, self.first = lengths, steps, jitter, first
        self._key = first if key is None else key

    @cached_property
    def counts(self) -> IntArray:
        """`(sources,)`, number of sections of each; a source that fits in one section is not cut."""
        if self.steps is None:
            return np.ones(len(self.lengths), np.int64)
        counts: IntArray = np.where(self.lengths > self.steps, -(-self.lengths // self.steps) + self.jitter, 1)
        return counts

    def bounds(self, sources: IntArray, places: IntArray, key: int) -> tuple[IntArray, IntArray]:
        """Return the beginnings and ends of some sections: arrays `(sections,)`.

        Args:
            sources: `(sections,)`, the source of each, counted within the list.
            places: `(sections,)`, the index of each among its source's sections.
            key: The epoch's key, see `cuts_key`.
        """
        lengths = self.lengths[sources]
        if self.steps is None:
            return np.zeros_like(lengths), lengths
        steps = self.steps
        offsets = offsets_of(key, sources + self._key, steps) if self.jitter else np.full_like(lengths, steps)
        offsets = np.where(lengths > steps, offsets, lengths)  # an unknown length, -1, stays -1
        starts = np.where(places == 0, 0, np.minimum(offsets + (places - 1) * steps, lengths))
        return starts, np.minimum(offsets + places * steps, lengths)

    def items(self, source: int, _key: int) -> IntArray:
        """Return the items that are read of a source, by its index within the list, in order."""
        return np.arange(self.lengths[source])


def offsets_of(key: int, sources: IntArray, steps: int) -> IntArray:
    """Draw a number from 1 to `steps` for each source, by the finalizer of SplitMix64 (Steele, Lea and Flood 2014)."""
    value = np.uint64(key) + sources.astype(np.uint64) * _GOLDEN
    value = (value ^ value >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ value >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    value = (value ^ value >> np.uint64(31)) >> np.uint64(32)  # 32 bits, and steps of at most 31: the product fits
    offsets: npt.NDArray[np.uint64] = value * np.uint64(steps) >> np.uint64(32)
    return offsets.astype(np.int64) + 1


class Cuts:
    """The sections of several lists of sources, numbered through."""

    def __init__(self, lists: Sequence[Cut], seed: int) -> None:
        self._lists, self._seed = tuple(lists), seed
        counts = np.concatenate([cut.counts for cut in self._lists])
        self._firsts: IntArray = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)  # by source; the end is last
        self._begins = [cut.first for cut in self._lists]
        self._make_cache()

    def _make_cache(self) -> None:
        self._key = lru_cache(2)(partial(cuts_key, self._seed))
        self._lengths = lru_cache(1)(self._all_lengths)

    def under(self, seed: int) -> Cuts:
        """Return the same cuts with another seed."""
        if seed == self._seed:
            return self
        other = object.__new__(Cuts)
        other.__dict__.update(self.__dict__)
        other._seed = seed
        other._make_cache()
        return other

    def __len__(self) -> int:
        """Return the number of sections, including empty ones; it is the same in every epoch."""
        return int(self._firsts[-1])

    def source(self, number: int) -> int:
        """Return the index of a section's source."""
        return int(np.searchsorted(self._firsts, number, side="right")) - 1

    def section(self, number: int, epoch: int) -> Section:
        """Return a section by its number."""
        source = self.source(number)
        cut = self._list(source)
        within, place = np.array([source - cut.first]), np.array([number - int(self._firsts[source])])
        starts, stops = cut.bounds(within, place, self._key(epoch))
        return Section(source, int(starts[0]), int(stops[0]), int(cut.lengths[within[0]]))

    def _list(self, source: int) -> Cut:
        return self._lists[int(np.searchsorted(self._begins, source, side="right")) - 1]

    def skips(self, source: int) -> bool:
        """Return whether a source's sections leave out items of it."""
        return self._list(source).skips

    def items(self, source: int, epoch: int) -> IntArray:
        """Return the items that are read of a source, in order."""
        cut = self._list(source)
        return cut.items(source - cut.first, self._key(epoch))

    def lengths(self, epoch: int) -> IntArray:
        """`(sections,)`, the number of items of each; -1 is unknown."""
        return self._lengths(epoch)

    def _all_lengths(self, epoch: int) -> IntArray:
        found = []
        for cut in self._lists:
            sources = np.repeat(np.arange(len(cut.lengths)), cut.counts)
            places = np.arange(len(sources)) - np.repeat(np.cumsum(cut.counts) - cut.counts, cut.counts)
            starts, stops = cut.bounds(sources, places, self._key(epoch))
            found.append(np.where(stops < 0, -1, stops - starts))
        return np.concatenate(found)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_key", "_lengths")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._make_cache()


#: Number of items of each source, or of each section, whose lengths may differ from epoch to epoch.
Lengths: TypeAlias = IntArray | Cuts


def lengths_in(lengths: Lengths | None, epoch: int) -> IntArray | None:
    """Return the lengths in an epoch; None if they are not known."""
    return lengths.lengths(epoch) if isinstance(lengths, Cuts) else lengths
