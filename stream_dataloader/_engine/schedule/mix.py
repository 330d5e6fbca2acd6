"""Order in which sources are drawn from several lists, by weight: pure functions, no torch, clock or lock.

Each list has a *share* p of all draws, its weight over the sum of all. Its k-th draw is *due* at (k + u) / p,
and draws are made in order of when they are due: u is 1/2, or random in [0, 1) for each draw. `weighting` says when
they are due if the weights change::

    shares   due with u = 1/2                        drawn
    a  3/4   a at 2/3    2    10/3  14/3    6
    b  1/4   b at        2                  6        a  a b  a  a  a b ...

So at every moment a list is within a few draws of its share.

A run that goes on from a saved state may have other weights than before, or longer lists: an order then has several
*phases*. The first draws stay those that they were, whatever follows.

Guarantee: the order is a function of (weights, sizes, seed, epoch, past); the n-th draw is found in blocks, so an
endless order takes no more memory than a short one.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np

from stream_dataloader._engine.schedule.passes import Passes
from stream_dataloader._engine.schedule.weighting import Counts, Pace, Shares, Weights, shares_of
from stream_dataloader.stream_info import order_rng

Schedule = Literal["longest_first", "balanced"]
Exhausted = Literal["leave_out", "repeat"]

_BLOCK = 1 << 14  # draws whose order is made at once


class Replaced(NamedTuple):
    """Weights and sizes of lists that were replaced while a run was going on.

    Attributes:
        epoch: Epoch, or pass over all lists, in which they were replaced.
        draw: First draw of that epoch by the new ones.
        counts: Number of earlier draws of that epoch from each list.
        weights: The weights until then.
        sizes: The numbers of sources until then.
    """

    epoch: int
    draw: int
    counts: tuple[int, ...]
    weights: Weights
    sizes: tuple[int, ...]


class Phase(NamedTuple):
    """Draws of an epoch by the same weights from lists of the same sizes.

    Attributes:
        pace: The draws from each list, from the phase's first draw on.
        passes: The passes over each list.
    """

    pace: Pace
    passes: tuple[Passes, ...]

    @property
    def full(self) -> Counts:
        """`(lists,)`, the number of draws from each list in which all its sources come."""
        return np.array([one.until_all() for one in self.passes], np.int64)


@dataclass(frozen=True)
class Mix:
    """Several lists of sources, and how they are drawn from.

    Attributes:
        sizes: Number of sources of each list.
        weights: The weights of the lists, each from a draw on; any scale.
        exhausted: Whether a list is left out or starts again once all its sources were drawn.
        shuffles: Whether its sources come in a new order in each pass over it.
        schedules: The order in which its sources come.
        past: Earlier weights and sizes of the run, in order.
    """

    sizes: tuple[int, ...]
    weights: Weights
    exhausted: Exhausted
    shuffles: tuple[bool, ...]
    schedules: tuple[Schedule | None, ...]
    past: tuple[Replaced, ...] = ()

    def phases(self, epoch: int, *, endless: bool = False) -> list[Phase]:
        """Return the phases of an epoch.

        Args:
            endless: Lists start again and again, each on its own, and new sources join at a list's next pass.
        """
        own = [one for one in self.past if one.epoch == epoch]
        begins = [(0, (0,) * len(self.sizes)), *((one.draw, one.counts) for one in own)]
        until = [(one.weights, one.sizes) for one in self.past if one.epoch >= epoch]
        passes = tuple([Passes(0, joins=not endless) for _ in self.sizes])
        found, before = list[Phase](), (self.weights, self.sizes)
        # What is left of `until` is of later epochs.
        for (first, counts), (weights, sizes) in zip(begins, [*until, (self.weights, self.sizes)], strict=False):
            lists = zip(passes, counts, sizes, strict=True)
            passes = tuple([one if one.size == size else one.grow(count, size) for one, count, size in lists])
            only_grew, before = weights == before[0] and sizes != before[1], (weights, sizes)
            if endless and found and only_grew:  # the pace has nothing to do with sizes, so it stays as it was
                found[-1] = found[-1]._replace(passes=passes)
                continue
            left_out = np.array(sizes, np.int64) if self.exhausted == "leave_out" else None
            found.append(Phase(Pace.of(weights, first, np.array(counts, np.int64), left_out), passes))
        return found

    def quotas(self, phase: Phase) -> Shares:
        """Return `(lists,)`, the number of draws from each list in an epoch that ends in this phase.

        `"repeat"`: as many draws as it takes until each list was drawn once in full, at its share.
        """
        full = phase.full
        return full.astype(np.float64) if self.exhausted == "leave_out" else phase.pace.quotas(full)

    def never_in_full(self) -> int | None:
        """Return a list whose weight stays 0 before it was drawn once in full, so an epoch has no end; None if none."""
        phase = self._last_phase
        ends = phase.pace.ends(phase.full)
        return None if np.isfinite(ends).all() else int(np.argmax(ends))

    @property
    def _last_phase(self) -> Phase:
        return self.phases(self.past[-1].epoch if self.past else 0)[-1]

    @cached_property
    def draws(self) -> int:
        """Number of draws in an epoch. If weights or sizes were replaced, this counts the epoch in which they were."""
        return sum(self.sizes) if self.exhausted == "leave_out" else sum(map(int, self.quotas(self._last_phase)))

    @cached_property
    def draws_of_a_pass(self) -> int:
        """Number of draws, anywhere in an endless order, in which each list that has weight is drawn once in full."""
        shares = np.array([shares_of(weights) for _, weights in self.weights])
        least = np.where(shares > 0, shares, np.inf).min(axis=0)
        return max(sum(self.sizes), round(float((self.sizes / least).max())))

    @cached_property
    def starts(self) -> list[int]:
        """Index of each list's first source in the lists put one after the other; their end comes last."""
        return [0, *accumulate(self.sizes)]


class _Block(NamedTuple):
    """Consecutive draws.

    Attributes:
        first: Number of the first one.
        begin: `(lists,)`, draws from each list before.
        lists: `(draws,)`, the list of each.
        numbers: `(draws,)`, how many draws from that list come before.
    """

    first: int
    begin: Counts
    lists: Counts
    numbers: Counts


class DrawOrder:
    """The order of an epoch's draws: for each draw its list, and the number of earlier draws from that list.

    Args:
        seed: Seeds the draws, with the epoch; None draws as evenly as possible, always in the same order.
        endless: The order has no end, as lists start again and again. Only with `exhausted="repeat"`.

    Attributes:
        passes: The passes over each list.

    Example:
        >>> mix = Mix((6, 1), ((0, (3, 1)),), "repeat", (False, False), (None, None))
        >>> order = DrawOrder(mix, None, 0)
        >>> [order[draw] for draw in range(mix.draws)]
        [(0, 0), (0, 1), (1, 0), (0, 2), (0, 3), (0, 4), (1, 1), (0, 5)]
    """

    def __init__(self, mix: Mix, seed: int | None, epoch: int, *, endless: bool = False) -> None:
        assert not endless or mix.exhausted == "repeat"
        self._mix, self._seed, self._epoch = mix, seed, epoch
        phases = mix.phases(epoch, endless=endless)
        self.passes = phases[-1].passes
        self._paces = [phase.pace for phase in phases]
        self._firsts = [pace.first for pace in self._paces]
        self._quotas = [None if endless else mix.quotas(phase) for phase in phases]
        # Two threads may read this at once, so it is replaced as a whole and never changed in place.
        self._recent: tuple[_Block, ...] = ()

    def __getitem__(self, draw: int) -> tuple[int, int]:
        block, place = self._find(draw)
        return int(block.lists[place]), int(block.numbers[place])

    def counts_before(self, draw: int) -> tuple[int, ...]:
        """Return the number of draws from each list before a draw."""
        if not draw:
            return (0,) * len(self._mix.sizes)
        block, place = self._find(draw - 1)
        counts = block.begin + np.bincount(block.lists[: place + 1], minlength=len(block.begin))
        return tuple(map(int, counts))

    def _find(self, draw: int) -> tuple[_Block, int]:
        """Return the block that a draw is in, and its place there."""
        for block in self._recent:
            if 0 <= (place := draw - block.first) < len(block.lists):
                return block, place
        self._recent = (block := self._block(draw), *self._recent[:1])
        return block, draw - block.first

    def _drawn_before(self, phase: int, block: int) -> Counts:
        """Return `(lists,)`, the number of draws from each list before a block of a phase."""
        # "leave_out" uses a single block. Once only lists of small weight are left, draws become rare in time, so
        # blocks of equal time would hold very unequal numbers of draws.
        pace, quotas = self._paces[phase], self._quotas[phase]
        if self._mix.exhausted == "leave_out":
            assert quotas is not None
            return quotas.astype(np.int64) if block else pace.begin
        if block * _BLOCK <= pace.first:
            return pace.begin
        due = np.maximum(np.floor(pace.count(block * _BLOCK) + 0.5), pace.begin)
        return (due if quotas is None else np.minimum(due, quotas)).astype(np.int64)

    def _block(self, draw: int) -> _Block:
        """Compute the block that a draw is in."""
        phase = bisect_right(self._firsts, draw) - 1
        pace = self._paces[phase]
        number = 0 if self._mix.exhausted == "leave_out" else draw // _BLOCK
        # Shares are rounded, so the quotient may be off by a block in either direction.
        while self._drawn_before(phase, number).sum() > draw:
            number -= 1
        while self._drawn_before(phase, number + 1).sum() <= draw:
            number += 1
        begin = self._drawn_before(phase, number)
        counts = self._drawn_before(phase, number + 1) - begin
        lists = np.repeat(np.arange(len(counts)), counts)
        numbers = np.arange(len(lists)) + np.repeat(begin + counts - np.cumsum(counts), counts)
        key = (number, pace.first) if pace.first else (number,)
        part = 0.5 if self._seed is None else order_rng(self._seed, self._epoch, 0, *key).random(len(lists))
        wanted = numbers + part
        due = np.concatenate([pace.due(i, wanted[lists == i]) for i in range(len(counts))])
        if self._mix.exhausted == "repeat":
            # Chance may move a draw out of the block, to where its list has no weight. It then counts without chance.
            outside = (due < number * _BLOCK) | (due > (number + 1) * _BLOCK)
            evenly = np.concatenate([pace.due(i, numbers[lists == i] + 0.5) for i in range(len(counts))])
            due = np.where(outside, evenly, due)
        # The sort is stable so that draws that are due at the same moment come in the order of their lists.
        order = np.argsort(due, kind="stable")
        first = int(begin.sum())
        if phase + 1 < len(self._firsts):
            order = order[: self._firsts[phase + 1] - first]
        return _Block(first, begin, lists[order], numbers[order])
