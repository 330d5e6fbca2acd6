"""`Rules`: everything that the assignment of sources to lanes depends on. `draws.py` has the assignment itself.

Guarantee: pure functions of plain values, no torch, clock or lock.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from stream_dataloader._engine.schedule.mix import Mix, Replaced, Schedule
from stream_dataloader.errors import EmptySourcesError

__all__ = ["split_batch_size", "split_dataset_sizes"]

PaddingMode = Literal["zeros", "data", "drop", "cycle"]
Windows = Literal["aligned", "packed", "given"]

Source = TypeVar("Source")
IntArray = npt.NDArray[np.int64]

#: Later than any time, with room in an int64 to add to it.
NEVER = 2**62
#: Decisions that are not draws.
PENDING, NONE = -2, -1


def split_batch_size(batch_size: int, num_workers: int) -> list[int]:
    """Split lanes among workers as evenly as possible; the first workers get one more.

    Args:
        batch_size: Number of lanes.
        num_workers: Number of workers. A number above `batch_size` counts as `batch_size`, and 0 counts as 1.

    Example:
        >>> split_batch_size(8, 3)
        [3, 3, 2]
    """
    workers = max(1, min(num_workers, batch_size))
    share, rest = divmod(batch_size, workers)
    return [share + (worker < rest) for worker in range(workers)]


def split_dataset_sizes(sources: Sequence[Source], split_sizes: Sequence[int]) -> list[Sequence[Source]]:
    """Deal sources out to workers beforehand, in order, in proportion to their lanes.

    For code that came from other packages, which deal sources to workers like this. `StreamDataset` does not: its lanes
    take sources when they need them.

    Args:
        sources: The sources: a list, or another sequence that can be sliced.
        split_sizes: Number of lanes of each worker, as `split_batch_size` returns.

    Returns:
        A slice of `sources` for each worker; each source is in one of them. With at least as many sources as lanes, no
        worker gets fewer sources than it has lanes.

    Raises:
        ValueError: A size is negative, or all are 0.

    Example:
        >>> split_dataset_sizes(list("abcdefg"), split_batch_size(3, 2))
        [['a', 'b', 'c', 'd'], ['e', 'f', 'g']]
    """
    total = sum(split_sizes)
    if total <= 0 or min(split_sizes) < 0:
        raise ValueError(
            f"split_sizes are {list(split_sizes)}, and must be numbers of lanes, at least one of them above 0; "
            "see split_batch_size"
        )
    ends = [len(sources) * lanes // total for lanes in itertools.accumulate(split_sizes, initial=0)]
    return [sources[begin:end] for begin, end in itertools.pairwise(ends)]


class Reader(NamedTuple):
    """Reader of some lanes: a worker, or this process.

    Attributes:
        worker_id: The worker.
        lanes: The lanes, consecutive; at least one.
    """

    worker_id: int
    lanes: range


def deal_lanes(lanes: int, workers: int) -> tuple[Reader, ...]:
    """Deal a batch's lanes to workers, in lane order; without workers, all to one reader.

    Example:
        >>> [(reader.worker_id, list(reader.lanes)) for reader in deal_lanes(5, 2)]
        [(0, [0, 1, 2]), (1, [3, 4])]
    """
    ends = itertools.accumulate(split_batch_size(lanes, workers), initial=0)
    owned = [range(begin, end) for begin, end in itertools.pairwise(ends)]
    return tuple(Reader(worker_id, own) for worker_id, own in enumerate(owned))


@dataclass(frozen=True)
class Groups:
    """The groups (virtual ranks) that an epoch's order is dealt to; this process hosts `[first, first + count)`.

    ::

        order of the epoch     a b c d e f g h i j          virtual_ranks=4, two ranks
        group 0                a       e       i            rank 0 hosts groups 0 and 1: its lanes are theirs,
        group 1                  b       f       j                 side by side
        group 2                    c       g                rank 1 hosts groups 2 and 3
        group 3                      d       h

    A group has its own cursor, lanes and requests, so what it reads does not depend on which rank hosts it.

    Attributes:
        total: Number of groups on all ranks.
        first: The first one hosted here.
        count: Number of groups hosted here, side by side.
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
                f"virtual_ranks is {total}, which {world_size} ranks cannot share evenly; {total} can be shared by "
                f"{', '.join(map(str, fitting))} ranks"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}, and there are {world_size} ranks, numbered from 0")
        count = total // world_size
        return cls(total, rank * count, count)

    @property
    def local(self) -> range:
        """The groups hosted here."""
        return range(self.first, self.first + self.count)

    def share(self, group: int, sources: int) -> int:
        """Return a group's number of the epoch's sources."""
        return (sources - group + self.total - 1) // self.total


#: One group, on one rank.
ALONE = Groups()


@dataclass(frozen=True)
class Rules:
    """Everything that the assignment of sources to lanes depends on, besides the streams' lengths and the epoch.

    With a `mix`, the sources are those of several lists, and `shuffle` means the draws from these lists.

    Attributes:
        lanes: Number of lanes of all groups that are hosted here; one group's lanes follow the other's.
    """

    num_sources: int
    lanes: int
    padding_mode: PaddingMode
    windows: Windows
    time_steps: int | None
    lookahead: int
    shuffle: bool
    schedule: Schedule | None
    seed: int
    deterministic: bool
    mix: Mix | None = None
    groups: Groups = ALONE

    @cached_property
    def draws(self) -> int:
        """Number of draws in a pass of all groups, including repeats of lists that start again."""
        if self.mix is None:
            return self.num_sources
        return self.mix.draws_of_a_pass if self.endless_mix else self.mix.draws

    def with_past(self, past: tuple[Replaced, ...]) -> Rules:
        """Return the rules of an epoch that began with other weights; see `Mix.past`."""
        return self if self.mix is None or self.mix.past == past else replace(self, mix=replace(self.mix, past=past))

    @cached_property
    def lanes_of_a_group(self) -> int:
        """Number of lanes of each group."""
        return self.lanes // self.groups.count

    @cached_property
    def shares(self) -> tuple[int, ...]:
        """Number of draws in a pass, of each group hosted here."""
        return tuple([self.groups.share(group, self.draws) for group in self.groups.local])

    @property
    def endless_mix(self) -> bool:
        """Whether each list of a mix starts again on its own."""
        return self.padding_mode == "cycle" and self.mix is not None and self.mix.exhausted == "repeat"

    def draws_of(self, lane: int) -> int:
        """Number of draws in a pass of a lane's group."""
        return self.shares[lane // self.lanes_of_a_group]

    @property
    def _dealt_anew(self) -> bool:
        """Whether a group may get other sources in each pass."""
        if self.groups.total == 1:
            return False
        shuffles = () if self.mix is None else self.mix.shuffles
        return self.shuffle or any(shuffles)

    def gives_up(self, lane: int, draws: int) -> bool:
        """Return whether a lane idles after `draws` sources in a row without an item; only with `"data"`.

        Raises:
            EmptySourcesError: With `"cycle"`, no source of its group has an item.
        """
        if self.padding_mode == "cycle" and draws >= self._most_draws(lane) + self.lookahead:
            raise EmptySourcesError(
                f"lane {lane} drew {draws} sources in a row from a list of {self.num_sources}, and none yielded an "
                'item; padding_mode="cycle" would go on for ever',
                lane=lane,
            )
        return self.padding_mode == "data" and draws >= self.draws_of(lane)

    def _most_draws(self, lane: int) -> int:
        """Return the number of draws in a row without an item that proves the group's sources empty, with `"cycle"`.

        They cover every source that the lane's group can get. If sources are dealt to groups anew in each pass, a
        source that has items is missed with a probability of (1 - 1 / groups) ** (24 * groups), about e ** -24.
        """
        passes = 3 if self.endless_mix else 2
        draws = passes * self.draws_of(lane) * (12 * self.groups.total if self._dealt_anew else 1)
        if self.deterministic:
            return draws
        # First come, first served: other lanes may take the only source that has items, and after a state is loaded,
        # draws that were taken ahead come again first. Without this margin a run with items could be called empty.
        return draws + 8 * self.lanes_of_a_group * (self.lookahead + 1)
