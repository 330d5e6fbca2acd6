"""Due times of draws from several lists, by weights that may change with the draws: pure functions, no torch.

Each list has a *share* p of all draws, its weight over the sum of all. Time is counted in draws, so a list's count of
draws grows by p for each. Weights that change make its count a line of several *pieces*::

    weights [(0, [3, 1]), (8, [1, 1])]

    time             0                       8                12 ...
    count of a       0 ------- p = 3/4 ----- 6 --- p = 1/2 -- 8
    count of b       0 ------- p = 1/4 ----- 2 --- p = 1/2 -- 4

A list's k-th draw is due when its count reaches k + u; u is 1/2, or random in [0, 1).

With `"leave_out"`, time runs faster than the draws once a list is used up. A piece then begins at the time at which its
number of draws was made. If only lists without weight are left, they share the draws equally.

Guarantee: the line up to a time depends only on the weights up to there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Counts: TypeAlias = npt.NDArray[np.int64]
Shares: TypeAlias = npt.NDArray[np.float64]

#: Pairs of a draw and the lists' weights from that draw on, in order; the first draw is 0.
Weights: TypeAlias = tuple[tuple[int, tuple[float, ...]], ...]

_ROUNDED = 1e-6  # a smaller part of a draw is a rounding error


def shares_of(weights: Sequence[float]) -> Shares:
    """Return `(lists,)`, the share of each list in all draws; they add up to 1."""
    most = max(weights)  # divided by first, as the sum of large weights may exceed the range of floats
    total = fsum(weight / most for weight in weights)
    return np.array([weight / most / total for weight in weights])


def used_at(weights: Weights, draws: Iterable[int]) -> list[tuple[float, ...]]:
    """Return the weights at some draws, which must ascend."""
    found, place = [], 0
    for draw in draws:
        while place + 1 < len(weights) and weights[place + 1][0] <= draw:
            place += 1
        found.append(weights[place][1])
    return found


@dataclass(frozen=True, eq=False)
class Pace:
    """Number of draws from each list, as a line over time, from draw `first` on.

    Attributes:
        first: The draw at which it begins.
        begin: `(lists,)`, number of draws from each list before that.
        times: `(pieces,)`, the time at which each piece begins.
        counts: `(pieces, lists)`, each list's count at that time.
        shares: `(pieces, lists)`, the growth of each count for each draw.
    """

    first: int
    begin: Counts
    times: Shares
    counts: Shares
    shares: Shares

    @classmethod
    def of(cls, weights: Weights, first: int, begin: Counts, sizes: Counts | None = None) -> Pace:
        """Return the pace by these weights from a draw on.

        Args:
            sizes: `(lists,)`, number of sources of each list, if lists that are used up are left out.
        """
        starts = [first, *(draw for draw, _ in weights if draw > first)]
        shares = [shares_of(used) for used in used_at(weights, starts)]
        if sizes is not None:
            return cls(first, begin, *_left_out(starts, shares, begin, sizes))
        times = np.array(starts, np.float64)
        grown = np.diff(times)[:, None] * np.array(shares[:-1]).reshape(-1, len(begin))
        counts = np.cumsum(np.vstack([begin[None].astype(np.float64), grown]), axis=0)
        return cls(first, begin, times, counts, np.array(shares))

    def count(self, time: float) -> Shares:
        """Return `(lists,)`, each list's count at a time."""
        piece = max(int(np.searchsorted(self.times, time, side="right")) - 1, 0)
        counts: Shares = self.counts[piece] + self.shares[piece] * (time - self.times[piece])
        return counts

    def due(self, number: int, counts: Shares) -> Shares:
        """Return the times at which a list reaches some counts; the time at which it stops to grow if it does not."""
        of_list = self.counts[:, number]
        # The first of the pieces that reach a count: the list may have no weight in those behind it.
        pieces = np.maximum(np.searchsorted(of_list, counts - _ROUNDED) - 1, 0)
        shares = self.shares[pieces, number]
        stops = self.times[np.searchsorted(of_list, of_list[-1])]
        grown = (counts - of_list[pieces]) / np.where(shares > 0, shares, 1)
        due: Shares = np.where(shares > 0, grown + self.times[pieces], stops)
        return due

    def ends(self, sizes: Counts) -> Shares:
        """Return `(lists,)`, the time at which each was drawn once in full, infinite for one that never will be."""
        return np.array([self._end(number, int(size)) for number, size in enumerate(sizes)])

    def _end(self, number: int, size: int) -> float:
        if size <= self.begin[number]:
            return float(self.first)
        if self.shares[-1, number] == 0 and self.counts[-1, number] < size - _ROUNDED:
            return np.inf
        return float(self.due(number, np.array([float(size)]))[0])

    def quotas(self, sizes: Counts) -> Shares:
        """Return `(lists,)`, the whole number of draws from each until all were drawn once in full."""
        at_end = np.floor(self.count(self.ends(sizes).max()) + 0.5)
        quotas: Shares = np.maximum(np.maximum(sizes, self.begin), at_end)
        return quotas


def _left_out(
    starts: Sequence[int], shares: Sequence[Shares], begin: Counts, sizes: Counts
) -> tuple[Shares, Shares, Shares]:
    """Return times, counts and shares of the pieces, where lists that are used up are left out."""
    total = int(sizes.sum())
    times, counts, used = [float(starts[0])], [begin.astype(np.float64)], []
    for share, stop in zip(shares, [*starts[1:], total], strict=True):
        growing = share
        while True:
            used.append(growing)
            left = sizes - counts[-1]
            left[left < _ROUNDED] = 0
            to_draw = min(stop, total) - (total - left.sum())
            elapsed, rest = _elapsed(growing, left, to_draw)
            times.append(times[-1] + elapsed)
            counts.append(counts[-1] + growing * elapsed)
            others = (growing == 0) & (left > 0)
            if rest <= 0 or not others.any():
                break
            growing = others / others.sum()
    return np.array(times[:-1]), np.array(counts[:-1]), np.array(used)


def _elapsed(share: Shares, left: Shares, draws: float) -> tuple[float, float]:
    """Return the time that a number of draws takes, and the number still to be made once all lists are used up."""
    ends = np.where(share > 0, left / np.where(share > 0, share, 1), 0)
    time = 0.0
    for end in np.unique(ends[ends > 0]):
        rate = float(share[ends >= end].sum())
        if rate * (end - time) >= draws:
            return time + max(draws, 0) / rate, 0.0
        draws, time = draws - rate * (float(end) - time), float(end)
    return time, draws if draws > _ROUNDED else 0.0
