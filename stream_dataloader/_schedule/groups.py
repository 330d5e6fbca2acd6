"""Groups: the epoch's order dealt to several loaders that know nothing of each other.

::

    order of the epoch     a b c d e f g h i j          groups=4, two ranks
    group 0                a       e       i            rank 0 hosts groups 0 and 1: its lanes are theirs,
    group 1                  b       f       j                 side by side
    group 2                    c       g                rank 1 hosts groups 2 and 3
    group 3                      d       h

A group has its own cursor, lanes and tickets, and is scheduled like a loader of its own. So what it reads does not
depend on which rank hosts it, nor on how many ranks there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ALONE", "Groups", "dealt_by_length"]


@dataclass(frozen=True)
class Groups:
    """The groups of an epoch, and those of them that this process hosts: `[first, first + count)`.

    Attributes:
        total: How many there are, on all ranks.
        first: The first one hosted here.
        count: How many are hosted here, side by side.
    """

    total: int = 1
    first: int = 0
    count: int = 1

    @classmethod
    def of_rank(cls, total: int, rank: int, world_size: int) -> Groups:
        """The groups of one rank.

        Raises:
            ValueError: The ranks cannot share them evenly, or there is no such rank.
        """
        if total < 1 or world_size < 1 or total % world_size:
            fitting = [size for size in range(1, max(total, 1) + 1) if total % size == 0]
            raise ValueError(
                f"groups is {total}, which {world_size} ranks cannot share evenly; {total} groups can be hosted by "
                f"{', '.join(map(str, fitting))} ranks"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}, and there are {world_size} ranks, numbered from 0")
        count = total // world_size
        return cls(total, rank * count, count)

    def share(self, group: int, sources: int) -> int:
        """How many of the epoch's sources a group gets."""
        return (sources - group + self.total - 1) // self.total


#: One group, on one rank.
ALONE = Groups()


def dealt_by_length(order: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], groups: int) -> Any:
    """An order in which dealing round-robin gives the groups about the same to read.

    Of each `groups` sources in a row the longest goes to the group that has least so far: for an order by length that
    is nearly the rule of Graham (Bounds on multiprocessing timing anomalies, 1969), but all groups get the same number.
    """
    dealt = order.copy()
    loads = np.zeros(groups, np.int64)
    for begin in range(0, len(order), groups):
        block = order[begin : begin + groups]
        longest_first = block[np.argsort(-lengths[block], kind="stable")]
        least_first = np.argsort(loads[: len(block)], kind="stable")
        dealt[begin + least_first] = longest_first
        loads[least_first] += lengths[longest_first]
    return dealt
