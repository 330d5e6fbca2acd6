"""Follows an epoch as it is delivered, so that it can be gone on with from any batch.

Workers run ahead of what was delivered, so their state is not the state. Each part reports which sources its
lanes took in the step and how far they have read; `Progress` follows, part by part as they are delivered, by the
same pure rules (`rules.Rules`, `reservations`) that the workers and their ledger follow.

Guarantee: following costs next to nothing; a snapshot is unpacked only when one is asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from stream_dataloader._schedule.reservations import next_grant
from stream_dataloader._schedule.rules import NONE, Rules
from stream_dataloader._schedule.snapshot import LaneReports, PackedSnapshot, Snapshot, beginning, pack_progress


class Progress:
    """Follows an epoch as it is delivered.

    Attributes:
        step: Number of steps delivered.
        last: Where the epoch stands.
    """

    def __init__(self, rules: Rules, epoch: int, start: Snapshot | None, parts: int) -> None:
        self.epoch = epoch
        self._rules = rules
        start = start or beginning(rules)
        self.step = start.step
        self._cursors = list(start.cursors)
        self._missing = dict.fromkeys(start.returned)  # in order, as a dict keeps it
        self._grants = tuple([lane.grant for lane in start.lanes])
        self._reserved = tuple([lane.reserved for lane in start.lanes])
        self._streams = {i: lane.stream for i, lane in enumerate(start.lanes) if lane.stream is not None}
        whole = pack_progress([lane.progress for lane in start.lanes])
        self._lanes: list[bytes] = [whole, *[b""] * (parts - 1)]
        self._keep()

    def _keep(self) -> None:
        returned = tuple(self._missing) if self._missing else ()
        lanes = tuple(self._lanes)
        self.last = PackedSnapshot(
            self.step, tuple(self._cursors), returned, self._grants, self._reserved, lanes, self._streams
        )

    def advance(self, reports: Sequence[LaneReports | None]) -> None:
        """Follow one more step."""
        self.step += 1
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
        rules, grants, reserved = self._rules, list(self._grants), list(self._reserved)
        for lane, grant in taken:
            if rules.deterministic:
                decide = functools.partial(rules.decide, lane, self._cursors)
                expected, reserved[lane] = next_grant(reserved[lane], rules.lookahead, decide)
                assert grant == expected, f"lane {lane} took grant {grant}, and {expected} was its turn"
            elif grant != NONE:
                self._note(grant)
            grants[lane] = grant
        self._grants, self._reserved = tuple(grants), tuple(reserved)

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
