"""Follows an epoch as it is delivered, so that it can be gone on with from any batch.

Workers run ahead of what was delivered, so their state is not the state. Each part tells which sources its
lanes took in the step and how far they have read; `Progress` follows, part by part as they are delivered, by the
same pure rules (`rules.Rules`) that the workers' ledger follows. Between two steps every ticket is decided,
so little is left to be kept: a cursor, and for each lane what it reads and has reserved.

Guarantee: following costs next to nothing; a snapshot is made only when one is asked for.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from stream_dataloader._schedule.reservations import Reservations, next_grant
from stream_dataloader._schedule.rules import NONE, Rules

_KEPT_RECORDS = 64  # trainers fetch ahead: the state can be had as of so many batches ago


class After(NamedTuple):
    """What a lane tells of itself after a step: how far its stream is read, in items and in time steps."""

    open: int
    items: int
    position: int
    first_window: int
    draws_without_item: int
    idle: int


#: Before the first step.
AT_START = After(0, 0, 0, 0, 0, 0)


def pack_after(lanes: Iterable[After]) -> bytes:
    """What some lanes tell, for a message."""
    return array("q", [number for lane in lanes for number in lane]).tobytes()


class LaneState(NamedTuple):
    """Where a lane stands between two steps.

    Attributes:
        grant: Number of its open stream's grant; `NONE` if there is none.
        after: What it told after the step.
        reserved: Grants of its reservations, `NONE` for one that was refused; None if it reserves no more.
        stream: What the stream's own `state_dict` returned, if it has one.
    """

    grant: int
    after: After
    reserved: tuple[int, ...] | None
    stream: Any = None


class Snapshot(NamedTuple):
    """Where an epoch stands between two steps.

    Attributes:
        step: The step that comes next.
        cursors: Grants given so far, by group hosted.
        returned: Grants among them that were not delivered, and are to be given again first.
        lanes: One state a lane.
    """

    step: int
    cursors: tuple[int, ...]
    returned: tuple[int, ...]
    lanes: tuple[LaneState, ...]


class Record(NamedTuple):
    """A `Snapshot`, unread: what costs nothing to keep at each step."""

    step: int
    cursors: tuple[int, ...]
    returned: tuple[int, ...]
    grants: tuple[int, ...]
    reserved: tuple[tuple[int, ...] | None, ...]
    after: tuple[bytes, ...]
    streams: Mapping[int, Any]


class Told(NamedTuple):
    """What a part tells for this.

    Attributes:
        taken: The sources its lanes took, in order: lane and grant.
        after: What each of its lanes tells, see `pack_after`.
        streams: States of the streams that have some, by lane.
    """

    taken: tuple[tuple[int, int], ...]
    after: bytes
    streams: Mapping[int, Any]


class Progress:
    """Follows an epoch as it is delivered.

    Args:
        rules: Those of the dataset.
        epoch: The epoch's number.
        start: Where it begins; None at its beginning.
        parts: How many parts a step has.

    Attributes:
        epoch: The epoch's number.
        finished: The epoch's end was seen.
    """

    def __init__(self, rules: Rules, epoch: int, start: Snapshot | None, parts: int) -> None:
        self._rules, self.epoch, self.finished = rules, epoch, False
        start = start or beginning(rules)
        self._step, self._cursors = start.step, list(start.cursors)
        self._missing = dict.fromkeys(start.returned)
        self._grants = tuple(lane.grant for lane in start.lanes)
        self._reserved = tuple(lane.reserved for lane in start.lanes)  # what records share; a new one as it changes
        self._reservations = [Reservations(rules.lookahead, held) for held in self._reserved]
        self._streams = {i: lane.stream for i, lane in enumerate(start.lanes) if lane.stream is not None}
        whole = pack_after(lane.after for lane in start.lanes)
        self._after: list[bytes] = [whole, *[b""] * (parts - 1)]
        self._held = self._end_held = False
        self._records: deque[Record] = deque(maxlen=_KEPT_RECORDS)
        self._keep()

    def _keep(self) -> None:
        returned = tuple(self._missing) if self._missing else ()
        after = tuple(self._after)
        self._records.append(
            Record(self._step, tuple(self._cursors), returned, self._grants, self._reserved, after, self._streams)
        )

    def advance(self, told: Sequence[Told | None]) -> None:
        """Follow one more step.

        Args:
            told: What each part tells; None for a worker that ended before.
        """
        self._step += 1
        for i, part in enumerate(told):
            if part is None:
                continue
            self._after[i] = part.after
            if part.taken:
                self._take(part.taken)
            if part.streams or self._streams:
                self._streams = {**self._streams, **part.streams}
        self._keep()

    def _take(self, taken: Iterable[tuple[int, int]]) -> None:
        grants = list(self._grants)
        for lane, grant in taken:
            if self._rules.deterministic:
                expected = self._replay(lane)
                assert grant == expected, f"lane {lane} took grant {grant}, and {expected} was its turn"
            elif grant != NONE:
                self._note(grant)
            grants[lane] = grant
        self._grants = tuple(grants)

    def _replay(self, lane: int) -> int:
        """What a lane that takes its next source gets."""
        reservations = self._reservations[lane]
        grant = next_grant(reservations, lambda ahead: self._rules.decide(lane, self._cursors, ahead))
        if self._reserved[lane] is not None:
            self._reserved = (*self._reserved[:lane], reservations.held, *self._reserved[lane + 1 :])
        return grant

    def _note(self, grant: int) -> None:
        """A source was taken, in whatever order; those before it that were not are still to come."""
        total = self._rules.groups.total
        count, group = divmod(grant, total)
        hosted = group - self._rules.groups.first
        cursor = self._cursors[hosted]
        if count >= cursor:
            self._missing.update(dict.fromkeys(range(cursor * total + group, grant, total)))
            self._cursors[hosted] = count + 1
        else:
            self._missing.pop(grant, None)

    def hold(self, batch: bool, end: bool) -> None:
        """Say what was followed and not handed out yet: the last batch, the epoch's end."""
        self._held, self._end_held = batch, end

    @property
    def over(self) -> bool:
        """The epoch is over for the user too."""
        return self.finished and not self._end_held

    @property
    def step(self) -> int:
        """Number of steps delivered."""
        return self._step

    def record(self, step: int | None = None) -> Record:
        """Where the epoch stands, or stood before `step`; for `read`.

        Raises:
            ValueError: That is too long ago, or was not delivered yet.
        """
        if step is None:
            step = self._step - self._held
        record: Record
        for record in reversed(tuple(self._records)):  # another thread may be reading on
            if record.step == step:
                return record
        raise ValueError(
            f"the state as of step {step} is not known: steps {self._records[0].step} to {self._step} are; save it "
            "sooner, or ask the batch for it"
        )


def read(record: Record, rules: Rules) -> Snapshot:
    """What a record says."""
    # the first part's bytes cover all lanes until the parts of the first step have come
    numbers = array("q", b"".join(record.after))
    width = len(AT_START)
    lanes = []
    for lane in range(rules.lanes):
        after = After(*numbers[lane * width : (lane + 1) * width])
        grant = record.grants[lane] if after.open else NONE
        reserved = record.reserved[lane] if rules.deterministic or after.idle else beginning(rules).lanes[0].reserved
        lanes.append(LaneState(grant, after, reserved, record.streams.get(lane) if after.open else None))
    return Snapshot(record.step, record.cursors, record.returned, tuple(lanes))


def beginning(rules: Rules) -> Snapshot:
    """Before the first step."""
    lane = LaneState(NONE, AT_START, () if rules.lookahead else None)
    return Snapshot(0, (0,) * rules.groups.count, (), (lane,) * rules.lanes)
