"""The order in which the sources of an epoch are handed out: as listed, shuffled, by length, mixed, dealt to groups.

Guarantee: a pure function of (rules, epoch, lengths); the source behind a draw depends on nothing else.
"""

from __future__ import annotations

import functools
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np

from stream_dataloader._engine.schedule.mix import DrawOrder, Mix
from stream_dataloader._engine.schedule.passes import Passes
from stream_dataloader._engine.schedule.place import Place
from stream_dataloader._engine.schedule.rules import ALONE, NEVER, IntArray, Rules
from stream_dataloader._engine.schedule.sections import Lengths, lengths_in
from stream_dataloader.stream_info import order_rng

#: The most sources whose shuffled order is kept as an array, which takes 32 MiB in each worker.
MOST_IN_MEMORY = 1 << 22

_ALL = slice(None)

_MASK = 2**64 - 1
_ROUNDS = 8  # 4 are enough with ideal round functions (Luby and Rackoff); twice as many for a simple one


class Permutation:
    """A random order of very many sources, which takes no memory.

    A permutation of `range(size)` by a keyed Feistel network (Luby and Rackoff 1988), which is applied again until the
    result is in range (Black and Rogaway, Ciphers with arbitrary finite domains, 2002). The round function is the
    finalizer of SplitMix64.
    """

    def __init__(self, size: int, rng: np.random.Generator) -> None:
        self._size = size
        # A place has two halves of equal width, so the network permutes the next power of 4: less than 4 times `size`,
        # and a place takes 4 walks at most on average.
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._keys = [int(key) for key in rng.integers(0, 2**64, _ROUNDS, np.uint64)]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, place: int) -> int:
        """Return the element at a place."""
        if not 0 <= place < self._size:
            raise IndexError(f"place {place} is out of range for {self._size}")
        half, mask = self._half, (1 << self._half) - 1
        while True:
            left, right = place >> half, place & mask
            for key in self._keys:
                left, right = right, left ^ (_mixed(right + key) & mask)
            place = left << half | right
            if place < self._size:
                return place


def _mixed(value: int) -> int:
    value &= _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


#: The source at each place.
Listing: TypeAlias = IntArray | Permutation


class Assignment(NamedTuple):
    """The meaning of a draw.

    Attributes:
        source: Index of the source, or number of the section.
        epoch: The epoch that the read counts for.
        repeat: How often the source was handed out before in this epoch as new data.
        fresh: Whether it counts as new data; False where `"data"` re-reads it.
    """

    source: int
    epoch: int
    repeat: int
    fresh: bool


class Order:
    """The sources in the order in which they are handed out, over all passes of one epoch.

    Args:
        place: A place in the epoch, which knows whether the list grew.
        lengths: Items of each source, or of each section in each epoch, if known.

    Attributes:
        epoch: The epoch's number.
    """

    def __init__(self, rules: Rules, place: Place, lengths: Lengths | None) -> None:
        self.epoch, self._cycles, self._rules = place.epoch, rules.padding_mode == "cycle", rules
        self._groups, growth = rules.groups, place.growth or ()
        self._list = Passes(rules.num_sources, growth, joins=not self._cycles)

        @functools.cache
        def passes(group: int) -> Passes:
            """Return the passes over a group's share of the sources."""
            share = functools.partial(rules.groups.share, group)
            grown = tuple([(turn, share(size)) for turn, size in growth])
            return Passes(NEVER if rules.endless_mix else share(rules.draws), grown)

        self._passes = passes
        # Two passes are kept, as at the end of a pass some lanes already read the next one.
        self._orders = functools.lru_cache(2)(lambda epoch, sizes: _pass_order(rules, epoch, lengths, sizes))
        self._mixed = None if rules.mix is None else _MixedOrder(rules, rules.mix, lengths)

    def __getitem__(self, draw: int) -> Assignment:
        """Look a draw up; `"data"` starts over with the same pass, `"cycle"` with the next epoch's."""
        count, group = divmod(draw, self._groups.total)
        passes = self._passes(group)
        # Most lists never grow. Each stream is looked up here, so they take the short way.
        turn, index = passes.find(count) if passes.grown else divmod(count, passes.size)
        index = index * self._groups.total + group
        epoch = self.epoch + turn if self._cycles else self.epoch
        fresh = self._cycles or turn == 0
        if self._mixed is not None:
            return Assignment(*self._mixed.source(epoch, index), fresh)
        order = self._orders(epoch, self._list.sizes(turn) if passes.grown else (self._list.size,))
        return Assignment(index if order is None else int(order[index]), epoch, 0, fresh)

    def is_fresh(self, draw: int) -> bool:
        """Return whether a draw's source counts as new data."""
        return self._cycles or self.in_pass(*divmod(draw, self._groups.total))[0] == 0

    def in_pass(self, count: int, group: int) -> tuple[int, int]:
        """Return the pass that holds a group's n-th draw, and the draw's index within this pass."""
        return self._passes(group).find(count)


class _MixedOrder:
    """The sources of several lists in the order in which they are handed out in one pass."""

    def __init__(self, rules: Rules, mix: Mix, lengths: Lengths | None) -> None:
        self._starts, self._endless = mix.starts, rules.endless_mix

        @functools.lru_cache(2)
        def draws(epoch: int) -> DrawOrder:
            return DrawOrder(mix, rules.seed if rules.shuffle else None, epoch, endless=rules.endless_mix)

        def orders(number: int) -> Callable[[int, int, tuple[int, ...]], _Listed]:
            shuffle, schedule = mix.shuffles[number], mix.schedules[number]
            alone = replace(rules, shuffle=shuffle, schedule=schedule, mix=None, groups=ALONE)
            start = mix.starts[number]
            return functools.lru_cache(2)(
                lambda epoch, repeat, sizes: _pass_order(alone, epoch, lengths, sizes, number + 1, repeat, start=start)
            )

        self._draws = draws
        self._orders = [orders(number) for number in range(len(mix.sizes))]

    def source(self, epoch: int, draw: int) -> tuple[int, int, int]:
        """Return a draw's source, the epoch it counts for, and how often it was drawn before in that epoch."""
        draws = self._draws(epoch)
        number, count = draws[draw]
        passes = draws.passes[number]
        repeat, place = passes.find(count)
        sizes = passes.sizes(repeat)
        if self._endless:  # lists have passes of unequal length, so each pass over a list counts as one epoch of it
            epoch, repeat = epoch + repeat, 0
        order = self._orders[number](epoch, repeat, sizes)
        return self._starts[number] + (place if order is None else int(order[place])), epoch, repeat


class _Joined:
    """Several listings, one behind the other; None stands for the list's own order."""

    def __init__(self, begins: Sequence[int], listings: Sequence[Listing | None]) -> None:
        self._begins, self._listings = begins, listings

    def __getitem__(self, place: int) -> int:
        part = bisect_right(self._begins, place) - 1
        begin, listing = self._begins[part], self._listings[part]
        return place if listing is None else begin + int(listing[place - begin])


_Listed: TypeAlias = "Listing | _Joined | None"


def _pass_order(
    rules: Rules, epoch: int, lengths: Lengths | None, sizes: Sequence[int], *key: int, start: int = 0
) -> _Listed:
    """Return the order of a pass: sources that the list gained come after those that it had before.

    Args:
        sizes: Numbers of sources of the list, see `Passes.sizes`.
        key: Distinguishes the list from others in the random draws.
        start: Index of the list's first source.
    """
    begins, parts = (0, *sizes[:-1]), []
    for number, (begin, end) in enumerate(zip(begins, sizes, strict=True)):
        own = (*key, number) if number else key  # the old sources keep their order only with the key that they had
        alone = replace(rules, num_sources=end - begin)
        parts.append(epoch_order(alone, epoch, lengths, *own, part=slice(start + begin, start + end)))
    return parts[0] if len(parts) == 1 else _Joined(begins, parts)


def epoch_order(rules: Rules, epoch: int, lengths: Lengths | None, *key: int, part: slice = _ALL) -> Listing | None:
    """Return the order of an epoch, or of a list in it, as a permutation of indices; None: the list's own order.

    `"balanced"`: a source's chance to come next is proportional to its length. Sort by -log(u) / w, u uniform
    (Efraimidis and Spirakis, Weighted random sampling with a reservoir, 2006).

    Args:
        lengths: Items of all sources, or of all sections.
        key: Distinguishes the list from others in the random draws.
        part: The list's slice of all sources.
    """
    known = None
    if rules.schedule is not None or rules.groups.total > 1:  # otherwise the order does not depend on lengths
        known = lengths_in(lengths, epoch)
        known = None if known is None else known[part]
    order = _epoch_order(rules, epoch, known, *key, has_lengths=lengths is not None)
    if known is None or rules.groups.total == 1 or (known < 0).any():
        return order
    order = np.arange(rules.num_sources) if order is None else np.asarray(order)
    return dealt_by_length(order, known, rules.groups.total)


def _epoch_order(rules: Rules, epoch: int, lengths: IntArray | None, *key: int, has_lengths: bool) -> Listing | None:
    if rules.schedule is None and not rules.shuffle:
        return None
    rng = order_rng(rules.seed, epoch, *key)
    if rules.schedule is None:
        if not has_lengths and rules.num_sources > MOST_IN_MEMORY:
            return Permutation(rules.num_sources, rng)
        return rng.permutation(rules.num_sources)
    assert lengths is not None
    if rules.schedule == "balanced":
        keys = rng.standard_exponential(rules.num_sources) / np.maximum(lengths, 1e-9)
        return np.argsort(keys, kind="stable")
    listed = rng.permutation(rules.num_sources) if rules.shuffle else np.arange(rules.num_sources)
    return listed[np.argsort(-lengths[listed], kind="stable")]


def dealt_by_length(order: IntArray, lengths: IntArray, groups: int) -> IntArray:
    """Reorder so that dealing round-robin gives each group about the same number of items.

    In each row of `groups` sources, the longest goes to the group with the fewest items so far (similar to Graham,
    1969).
    """
    block = np.arange(len(order)) // groups
    longest_first = order[np.lexsort((-lengths[order], block))]
    steps, loads, places = lengths[longest_first].tolist(), [0] * groups, array("q")
    for begin in range(0, len(order), groups):  # lists, as arrays of a few numbers take several times as long
        row = steps[begin : begin + groups]
        least_first = sorted(range(len(row)), key=loads.__getitem__)
        for group, length in zip(least_first, row, strict=True):
            loads[group] += length
        places.extend(least_first)
    dealt = np.empty_like(order)
    dealt[block * groups + np.frombuffer(places, np.int64)] = longest_first
    return dealt
