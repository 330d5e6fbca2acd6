"""Which lane reads which source, and when: pure functions, no torch, clock or lock.

Logical time orders everything. A *time* is `step * lanes + lane`: when lane 0 works on step 0, then lane 1
on step 0, and so on. A lane that needs a source takes out a *ticket* at its time, *now* if it is out of
data, or *ahead* as a reservation. Tickets are decided in order of time; the n-th one granted gets the n-th
source of the epoch's order. Who waits how long in real time changes nothing::

    step           0       1       2                tickets, in order   granted
    lane 0 (w 0)   a a a   a b b   b d d            (0, lane 0)         a
    lane 1 (w 1)   c c c   c c c   c c e            (0, lane 1)         c ...

Guarantee: the outcome is a function of the tickets alone, so it is the same for any number of workers.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stream_dataloader.groups import ALONE, Groups, dealt_by_length
from stream_dataloader.mixing import DrawOrder, Latest, Mix
from stream_dataloader.protocols import PaddingMode, Schedule, Windows
from stream_dataloader.stream_info import order_rng

__all__ = ["split_batch_size"]

IntArray = npt.NDArray[np.int64]

#: Later than any time.
NEVER = 2**62
#: Decisions that are no grant.
PENDING, NONE = -2, -1
#: Reservations are refused once at most this many sources a lane are left: the tail is purely just in time.
TAIL_SOURCES_PER_LANE = 2


def split_batch_size(batch_size: int, num_workers: int) -> list[int]:
    """How many lanes each worker owns: as even as can be, the first ones get the rest.

    Args:
        batch_size: Number of lanes.
        num_workers: Number of workers; more than lanes count as as many as lanes, 0 as one.

    Example:
        >>> split_batch_size(8, 3)
        [3, 3, 2]
    """
    workers = max(1, min(num_workers, batch_size))
    share, rest = divmod(batch_size, workers)
    return [share + (worker < rest) for worker in range(workers)]


def lanes_of_worker(batch_size: int, num_workers: int, worker_id: int) -> range:
    """The consecutive lanes of a worker; none for a worker beyond the lanes."""
    sizes = split_batch_size(batch_size, num_workers)
    start = sum(sizes[:worker_id])
    return range(start, start + sizes[worker_id]) if worker_id < len(sizes) else range(0)


@dataclass(frozen=True)
class Rules:
    """All that the assignment of sources to lanes depends on, besides the streams' lengths and the epoch.

    With a `mix` the sources are those of several lists, one list after the other, and `shuffle` is for the draws
    from the lists; each list's own order is up to the mix.

    Attributes:
        lanes: Those of all groups that are hosted here, one group's behind the other's.
        draws: Number of grants in a pass of all groups: one a source, but where lists that are exhausted start again.
    """

    num_sources: int
    lanes: int
    padding_mode: PaddingMode
    windows: Windows
    time_steps: int | None
    lookahead: int
    shuffle: bool
    schedule: Schedule
    seed: int
    deterministic: bool
    mix: Mix | None = None
    groups: Groups = ALONE
    draws: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "draws", self.num_sources if self.mix is None else self.mix.draws)

    @property
    def endless_mix(self) -> bool:
        """Each list of a mix cycles by itself: there is no pass over all of them."""
        return self.padding_mode == "cycle" and self.mix is not None and self.mix.exhausted == "repeat"

    @property
    def lanes_of_a_group(self) -> int:
        """How many of the lanes each group has."""
        return self.lanes // self.groups.count

    def draws_of(self, lane: int) -> int:
        """Number of grants in a pass of a lane's group."""
        return self.groups.share(self.groups.first + lane // self.lanes_of_a_group, self.draws)

    def draws_of_a_pass(self, lane: int) -> int:
        """So many grants in a row, with `"cycle"`, have every source of a lane's group, wherever they begin."""
        return (3 if self.endless_mix else 2) * self.draws_of(lane)

    def decide(self, lane: int, cursors: IntArray | list[int], ahead: bool) -> int:
        """What the next ticket of a lane's group in order gets: its grant, or `NONE`.

        A grant is numbered `n * groups + group`, the n-th of its group. For a ticket ahead `NONE` means refused, for
        one now that no source is left and the lane idles.

        Args:
            cursors: How many grants each group hosted here was given; counts on.
        """
        hosted = lane // self.lanes_of_a_group
        cursor = int(cursors[hosted])
        left = self.draws_of(lane) - cursor
        if ahead:
            refused = self.padding_mode != "cycle" and left <= TAIL_SOURCES_PER_LANE * self.lanes_of_a_group
        else:
            refused = left <= 0 and self.padding_mode in ("zeros", "drop")
        if refused:
            return NONE
        cursors[hosted] = cursor + 1
        return cursor * self.groups.total + self.groups.first + hosted


class Assignment(NamedTuple):
    """What a grant says."""

    source: int
    epoch: int
    repeat: int  # how often it was handed out before in this epoch, to be read as something new
    fresh: bool  # read as something new


class Order:
    """The sources in the order in which they are handed out, over all passes of one epoch.

    Args:
        rules: Those of the dataset.
        epoch: The epoch's number.
        lengths: Items of each source, if known.
        cursors: Grants given before this order is used, by group hosted.
        returned: Grants among them that are to be given again, first.

    Attributes:
        first: Where ledgers that use this order begin to count, by group hosted.
    """

    def __init__(
        self,
        rules: Rules,
        epoch: int,
        lengths: IntArray | None,
        cursors: Sequence[int] | None = None,
        returned: Sequence[int] = (),
    ) -> None:
        self._epoch, self._cycles, self._rules = epoch, rules.padding_mode == "cycle", rules
        self._groups = rules.groups
        self._returned = returned_by_group(rules, returned)
        cursors = cursors or [0] * rules.groups.count
        self.first = [cursor - len(again) for cursor, again in zip(cursors, self._returned, strict=True)]
        self._passes: Latest[int, IntArray | None]  # at most two are being read at once, mostly
        self._passes = Latest(lambda epoch: epoch_order(rules, epoch, lengths), 2)
        self._mixed = None if rules.mix is None else _MixedOrder(rules, rules.mix, lengths)

    def grant(self, number: int) -> int:
        """The grant that a ledger that starts with `first` means by a number."""
        count, group = divmod(number, self._groups.total)
        hosted = group - self._groups.first
        place, again = count - self.first[hosted], self._returned[hosted]
        return again[place] if 0 <= place < len(again) else number

    def __getitem__(self, grant: int) -> Assignment:
        """What a grant stands for; `"data"` starts over with the same pass, `"cycle"` with the next epoch's."""
        count, group = divmod(grant, self._groups.total)
        draws = NEVER if self._rules.endless_mix else self._groups.share(group, self._rules.draws)
        turn, index = divmod(count, draws)
        index = index * self._groups.total + group
        epoch = self._epoch + turn if self._cycles else self._epoch
        fresh = self._cycles or turn == 0
        if self._mixed is not None:
            return Assignment(*self._mixed.source(epoch, index), fresh)
        order = self._passes[epoch]
        return Assignment(index if order is None else int(order[index]), epoch, 0, fresh)


def returned_by_group(rules: Rules, returned: Sequence[int]) -> list[list[int]]:
    """Grants by the group hosted here that they are of, in their order."""
    by_group: list[list[int]] = [[] for _ in range(rules.groups.count)]
    for grant in returned:
        by_group[grant % rules.groups.total - rules.groups.first].append(grant)
    return by_group


class _MixedOrder:
    """The sources of several lists in the order in which they are handed out in one pass."""

    def __init__(self, rules: Rules, mix: Mix, lengths: IntArray | None) -> None:
        self._sizes, self._starts, self._endless = mix.sizes, mix.starts, rules.endless_mix

        def draws(epoch: int) -> DrawOrder:
            return DrawOrder(mix, rules.seed if rules.shuffle else None, epoch, endless=rules.endless_mix)

        def orders(number: int) -> Latest[tuple[int, int], IntArray | None]:
            start, stop = mix.starts[number : number + 2]
            shuffle, schedule = mix.shuffles[number], mix.schedules[number]
            alone = replace(
                rules, num_sources=stop - start, shuffle=shuffle, schedule=schedule, mix=None, groups=Groups()
            )
            known = None if lengths is None else lengths[start:stop]
            return Latest(lambda key: epoch_order(alone, key[0], known, number + 1, key[1]), 2)

        self._draws = Latest(draws, 2)
        self._orders = [orders(number) for number in range(len(mix.sizes))]

    def source(self, epoch: int, draw: int) -> tuple[int, int, int]:
        """What is drawn: the source, the epoch it counts for, and how often it was drawn before in that."""
        number, count = self._draws[epoch][draw]
        repeat, place = divmod(count, self._sizes[number])
        if self._endless:  # each pass over the list is an epoch for it
            epoch, repeat = epoch + repeat, 0
        order = self._orders[number][epoch, repeat]
        return self._starts[number] + (place if order is None else int(order[place])), epoch, repeat


def epoch_order(rules: Rules, epoch: int, lengths: IntArray | None, *part: int) -> IntArray | None:
    """The order of an epoch, or of a part of it, as a permutation of source indices; None stands for the list's own.

    `"balanced"` is a random permutation in which a source's chance to come next is proportional to its
    length: sort by u ** (1 / w), u uniform (Efraimidis and Spirakis, Weighted random sampling with a
    reservoir, 2006), here by -log(u) / w, ascending.
    """
    order = _epoch_order(rules, epoch, lengths, *part)
    if lengths is None or rules.groups.total == 1 or (lengths < 0).any():
        return order
    order = np.arange(rules.num_sources) if order is None else order
    dealt: IntArray = dealt_by_length(order, lengths, rules.groups.total)
    return dealt


def _epoch_order(rules: Rules, epoch: int, lengths: IntArray | None, *part: int) -> IntArray | None:
    if rules.schedule == "listed" and not rules.shuffle:
        return None
    rng = order_rng(rules.seed, epoch, *part)
    if rules.schedule == "listed":
        return rng.permutation(rules.num_sources)
    assert lengths is not None
    if rules.schedule == "balanced":
        keys = rng.standard_exponential(rules.num_sources) / np.maximum(lengths, 1e-9)
        return np.argsort(keys, kind="stable")
    listed = rng.permutation(rules.num_sources) if rules.shuffle else np.arange(rules.num_sources)
    return listed[np.argsort(-lengths[listed], kind="stable")]


class Ledger:
    """The tickets of one epoch, kept in a flat int64 array that several processes may share.

    Plain state and transitions; whoever calls `grant` must keep others out, see `source_queue`. A lane's
    tickets are numbered from 0 and decided in that order; at most `lookahead + 1` may be undecided or not
    yet looked up at a time.
    """

    def __init__(self, memory: IntArray, rules: Rules) -> None:
        lanes, self._slots = rules.lanes, rules.lookahead + 1
        self._rules = rules
        parts = iter(np.split(memory[lanes : self.size(rules)], np.cumsum([lanes] * 2 + [lanes * self._slots] * 2)))
        self._cursors = memory[:lanes]  # by group hosted; there are no more groups than lanes
        self._taken, self._decided = next(parts), next(parts)
        self._time = next(parts).reshape(lanes, self._slots)
        self._ahead = next(parts).reshape(lanes, self._slots)
        self._grant = next(parts).reshape(lanes, self._slots)

    @staticmethod
    def size(rules: Rules) -> int:
        """Number of int64 values a ledger takes; all zero is an empty one."""
        return rules.lanes * (3 + 3 * (rules.lookahead + 1))

    def start(self, cursors: Sequence[int]) -> None:
        """Begin with cursors other than 0."""
        self._cursors[: len(cursors)] = cursors

    def take(self, lane: int, time: int, ahead: bool) -> int:
        """Take out a lane's next ticket and return its number."""
        ticket = int(self._taken[lane])
        slot = ticket % self._slots
        self._time[lane, slot], self._ahead[lane, slot] = time, ahead
        self._taken[lane] = ticket + 1
        return ticket

    def grant(self, horizon: int) -> None:
        """Decide, in order, the tickets up to time `horizon`, which no earlier ticket can come before any more."""
        lanes = np.arange(self._rules.lanes)
        while True:
            head = self._time[lanes, self._decided % self._slots]
            head = np.where(self._taken > self._decided, head, NEVER)
            lane = int(head.argmin())
            if head[lane] > min(horizon, NEVER - 1):
                return
            slot = int(self._decided[lane]) % self._slots
            self._grant[lane, slot] = self._rules.decide(lane, self._cursors, bool(self._ahead[lane, slot]))
            self._decided[lane] += 1

    def has_undecided(self) -> bool:
        """Whether there is any ticket that was not decided."""
        return bool((self._taken > self._decided).any())

    def time(self, lane: int, ticket: int) -> int:
        """When a ticket was taken out."""
        return int(self._time[lane, ticket % self._slots])

    def decision(self, lane: int, ticket: int) -> int:
        """The number of a ticket's grant, `NONE` or `PENDING`."""
        return int(self._grant[lane, ticket % self._slots]) if ticket < self._decided[lane] else PENDING


def count_steps(rules: Rules, epoch: int, lengths: IntArray) -> int:
    """How many batches an epoch has, for streams of known lengths: those of the group that has most.

    With `"drop"` it is the group that has fewest. The same on every rank.

    Args:
        lengths: `(num_sources,)`, items of each source: time steps, or windows if `time_steps` is None.
    """
    assert rules.padding_mode != "cycle"
    last = min if rules.padding_mode == "drop" else max
    alone = [
        replace(rules, lanes=rules.lanes_of_a_group, groups=Groups(rules.groups.total, group, 1))
        for group in range(rules.groups.total)
    ]
    return last(_count_steps(group, epoch, lengths) for group in alone)


def _count_steps(rules: Rules, epoch: int, lengths: IntArray) -> int:
    """The same for one group: replays the assignment lane after lane, in order of time, each ticket decided at once."""
    order, window = Order(rules, epoch, lengths), rules.time_steps or 1
    reserved: list[deque[int] | None] = [deque() if rules.lookahead else None for _ in range(rules.lanes)]
    cell = [0] * rules.lanes  # the time step, counted over the epoch, that a lane fills next
    times = list(range(rules.lanes))  # when each lane is out of data next: a heap
    cursors, last_fresh, first_idle = [0], 0, NEVER

    def draw(ahead: bool) -> int:
        return rules.decide(0, cursors, ahead)

    def next_grant(lane: int) -> int:
        ahead = reserved[lane]
        if ahead is None:
            return draw(ahead=False)
        if not ahead:  # the lane starts
            ahead.extend(draw(ahead=True) for _ in range(rules.lookahead))
        grant = ahead.popleft()
        if grant == NONE:
            reserved[lane] = None
            return draw(ahead=False)
        ahead.append(draw(ahead=True))
        return grant

    while times:
        step, lane = divmod(heapq.heappop(times), rules.lanes)
        grant = next_grant(lane)
        if grant == NONE:
            first_idle = min(first_idle, -(-cell[lane] // window))
            continue
        source, _, _, fresh = order[grant]
        if not fresh:  # the lane will read nothing new any more
            continue
        length = int(lengths[source])
        if length:
            cell[lane] += length
            last_fresh = max(last_fresh, -(-cell[lane] // window))
            if rules.windows == "aligned":
                cell[lane] = -(-cell[lane] // window) * window
            step = cell[lane] // window
        heapq.heappush(times, step * rules.lanes + lane)
    return min(first_idle, last_fresh) if rules.padding_mode == "drop" else last_fresh
