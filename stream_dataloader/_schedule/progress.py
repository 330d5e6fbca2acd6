"""Follows an epoch as it is delivered, so that it can be gone on with from any batch.

Workers run ahead of what was delivered, so their state is not the state. Each part reports which sources its
lanes took in the step and how far they have read; `Progress` follows, part by part as they are delivered, by the
same pure rules (`rules.Rules`, `reservations`) that the workers and their ledger follow.

Guarantee: following costs next to nothing; a snapshot is unpacked only when one is asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from stream_dataloader._schedule.position import EpochsOfRun
from stream_dataloader._schedule.reservations import Reservations, next_grant
from stream_dataloader._schedule.rules import NONE, Rules
from stream_dataloader._schedule.snapshot import LaneReports, PackedSnapshot, Snapshot, beginning, pack_progress

KEPT_RECORDS = 64  # trainers fetch ahead: the state can be had as of so many batches ago


class HandedOut:
    """What of an epoch that is followed was handed out.

    Attributes:
        finished: The epoch's end was seen.
    """

    finished = False
    _held = False
    _end_held = False

    def hold(self, batch: bool, end: bool) -> None:
        """Say what was followed and not handed out yet: the last batch, the epoch's end."""
        self._held, self._end_held = batch, end

    @property
    def is_ahead(self) -> bool:
        """The last batch was followed and not handed out yet."""
        return self._held

    @property
    def end_is_ahead(self) -> bool:
        """The epoch's end was seen and not handed out yet."""
        return self.finished and self._end_held

    @property
    def over(self) -> bool:
        """The epoch is over for the user too."""
        return self.finished and not self._end_held


class Progress(HandedOut):
    """Follows an epoch as it is delivered.

    Args:
        rules: Those of the dataset.
        epoch: The epoch's number.
        start: Where it begins; None at its beginning.
        parts: How many parts a step has.

    Attributes:
        epoch: The epoch's number.
        epochs: The epochs of n batches that the run is read in; None if it is an epoch by itself.
    """

    def __init__(self, rules: Rules, epoch: int, start: Snapshot | None, parts: int) -> None:
        self.epoch = epoch
        self.epochs: EpochsOfRun | None = None
        self._rules = rules
        start = start or beginning(rules)
        self._step = start.step
        self._cursors = list(start.cursors)
        self._missing = dict.fromkeys(start.returned)  # in order, as a dict keeps it
        self._grants = tuple(lane.grant for lane in start.lanes)
        self._reserved = tuple(lane.reserved for lane in start.lanes)  # what records share; a new one as it changes
        self._reservations = [Reservations(rules.lookahead, held) for held in self._reserved]
        self._streams = {i: lane.stream for i, lane in enumerate(start.lanes) if lane.stream is not None}
        whole = pack_progress(lane.progress for lane in start.lanes)
        self._lanes: list[bytes] = [whole, *[b""] * (parts - 1)]
        self._records: deque[PackedSnapshot] = deque(maxlen=KEPT_RECORDS)
        self._keep()

    def _keep(self) -> None:
        returned = tuple(self._missing) if self._missing else ()
        lanes = tuple(self._lanes)
        self._records.append(
            PackedSnapshot(
                self._step, tuple(self._cursors), returned, self._grants, self._reserved, lanes, self._streams
            )
        )

    def advance(self, reports: Sequence[LaneReports | None]) -> None:
        """Follow one more step.

        Args:
            reports: What each part reports; None for a worker that ended before.
        """
        self._step += 1
        for i, report in enumerate(reports):
            if report is None:
                continue
            self._lanes[i] = report.progress
            if report.taken:
                self._take(report.taken)
            if report.streams or self._streams:
                self._streams = {**self._streams, **report.streams}
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

    @property
    def step(self) -> int:
        """Number of steps delivered."""
        return self._step

    def record(self, step: int | None = None) -> PackedSnapshot:
        """Where the epoch stands, or stood before `step`.

        Raises:
            ValueError: That is too long ago, or was not delivered yet.
        """
        if step is None:
            step = self._step - self._held
        record: PackedSnapshot = self._records[-1]
        if record.step == step:  # nearly always
            return record
        for record in reversed(tuple(self._records)):  # another thread may be reading on
            if record.step == step:
                return record
        raise ValueError(
            f"the state as of step {step} is not known: steps {self._records[0].step} to {self._step} are; save it "
            "sooner, or ask the batch for it"
        )
