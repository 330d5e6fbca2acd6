"""Order in which sources are drawn from several lists, by weight: pure functions, no torch, clock or lock.

Each list has a *share* p of all draws, its weight over the sum of all. Its k-th draw is *due* at (k + u) / p,
and draws are made in order of when they are due: u is 1/2, or random in [0, 1) for each draw::

    shares   due with u = 1/2                        drawn
    a  3/4   a at 2/3    2    10/3  14/3    6
    b  1/4   b at        2                  6        a  a b  a  a  a b ...

So at every moment a list is within a few draws of its share.

Guarantee: the order is a function of (weights, sizes, seed, epoch); the n-th draw is found in blocks, so an endless
order takes no more memory than a short one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import fsum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stream_dataloader.protocols import Exhausted, Schedule
from stream_dataloader.stream_info import order_rng

_BLOCK = 1 << 14  # draws whose order is made at once

Counts = npt.NDArray[np.int64]
Shares = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Mix:
    """Several lists of sources, and how they are drawn from.

    Attributes:
        sizes: Number of sources of each list.
        weights: Its weight, positive; any scale.
        exhausted: Whether a list is left out or starts again once all its sources were drawn.
        shuffles: Whether its sources come in a new order in each pass over it.
        schedules: The order in which its sources come.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    exhausted: Exhausted
    shuffles: tuple[bool, ...]
    schedules: tuple[Schedule | None, ...]

    @cached_property
    def shares(self) -> Shares:
        """`(lists,)`, the share of each list in all draws; they add up to 1."""
        most = max(self.weights)  # divided by first, as the sum of large weights may exceed the range of floats
        total = fsum(weight / most for weight in self.weights)
        return np.array([weight / most / total for weight in self.weights])

    @cached_property
    def quotas(self) -> Shares:
        """`(lists,)`, draws from each list in an epoch: whole numbers.

        `"repeat"`: as many draws as it takes until each list was drawn once in full, at its share.
        """
        sizes: Shares = np.array(self.sizes, np.float64)
        if self.exhausted == "leave_out":
            return sizes
        quotas: Shares = np.maximum(sizes, np.floor((sizes / self.shares).max() * self.shares + 0.5))
        return quotas

    @cached_property
    def draws(self) -> int:
        """Number of draws in an epoch."""
        return sum(map(int, self.quotas))

    @cached_property
    def starts(self) -> list[int]:
        """Index of each list's first source in the lists put one after the other; their end comes last."""
        return [0, *accumulate(self.sizes)]

    def drawn_before(self, block: int, *, endless: bool) -> Counts:
        """`(lists,)`, draws from each list before a block."""
        # "leave_out" uses a single block. Once only lists of small weight are left, draws become rare in time, so
        # blocks of equal time would hold very unequal numbers of draws.
        if self.exhausted == "leave_out":
            return (self.quotas if block else np.zeros(len(self.sizes))).astype(np.int64)
        due = np.floor(block * _BLOCK * self.shares + 0.5)
        return (due if endless else np.minimum(due, self.quotas)).astype(np.int64)


class _Block(NamedTuple):
    """Consecutive draws.

    Attributes:
        first: Number of the first one.
        lists: `(draws,)`, the list of each.
        numbers: `(draws,)`, how many draws from that list come before.
    """

    first: int
    lists: Counts
    numbers: Counts


class DrawOrder:
    """The order of an epoch's draws: for each draw its list, and the number of earlier draws from that list.

    Args:
        seed: Seeds the draws, with the epoch; None draws as evenly as possible, always in the same order.
        endless: The order has no end, as lists start again and again. Only with `exhausted="repeat"`.

    Example:
        >>> mix = Mix((6, 1), (3, 1), "repeat", (False, False), (None, None))
        >>> order = DrawOrder(mix, None, 0)
        >>> [order[draw] for draw in range(mix.draws)]
        [(0, 0), (0, 1), (1, 0), (0, 2), (0, 3), (0, 4), (1, 1), (0, 5)]
    """

    def __init__(self, mix: Mix, seed: int | None, epoch: int, *, endless: bool = False) -> None:
        assert not endless or mix.exhausted == "repeat"
        self._mix, self._seed, self._epoch, self._endless = mix, seed, epoch, endless
        # Two threads may read this at once, so it is replaced as a whole and never changed in place.
        self._recent: tuple[_Block, ...] = ()

    def __getitem__(self, draw: int) -> tuple[int, int]:
        for block in self._recent:
            if 0 <= (place := draw - block.first) < len(block.lists):
                return int(block.lists[place]), int(block.numbers[place])
        self._recent = (self._block(draw), *self._recent[:1])
        return self[draw]

    def _block(self, draw: int) -> _Block:
        """Compute the block that a draw is in."""

        def drawn_before(block: int) -> Counts:
            return self._mix.drawn_before(block, endless=self._endless)

        number = 0 if self._mix.exhausted == "leave_out" else draw // _BLOCK
        # Shares are rounded, so the quotient may be off by a block in either direction.
        while drawn_before(number).sum() > draw:
            number -= 1
        while drawn_before(number + 1).sum() <= draw:
            number += 1
        begin = drawn_before(number)
        counts = drawn_before(number + 1) - begin
        lists = np.repeat(np.arange(len(counts)), counts)
        numbers = np.arange(len(lists)) + np.repeat(begin + counts - np.cumsum(counts), counts)
        part = 0.5 if self._seed is None else order_rng(self._seed, self._epoch, 0, number).random(len(lists))
        # The sort is stable so that draws that are due at the same moment come in the order of their lists.
        order = np.argsort((numbers + part) / self._mix.shares[lists], kind="stable")
        return _Block(int(begin.sum()), lists[order], numbers[order])
