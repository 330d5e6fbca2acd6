"""Tickets that one lane holds ahead, and grants that are given again; the promises hold the rest."""

from stream_dataloader import StreamDataset
from stream_dataloader._schedule.rules import NONE, PENDING
from stream_dataloader._schedule.snapshot import LaneReports, LaneState, Progress, pack_progress
from stream_dataloader._schedule.tickets import next_grant


def test_a_ticket_that_is_not_decided_is_waited_for():
    tickets = {PENDING - 1: 5, PENDING - 2: NONE, PENDING - 3: 6}
    taken = iter(tickets)
    assert next_grant((), 1, lambda ahead: next(taken), tickets.get) == (5, (PENDING - 2,))
    assert next_grant((PENDING - 2,), 1, lambda ahead: next(taken, PENDING - 3), tickets.get) == (6, None)


def test_grants_that_others_took_and_did_not_deliver_are_saved_to_be_given_again():
    """First come, first served: the worker of lane 0 took grants 0 and 2, and its part has not come."""

    def reports(*taken):
        return LaneReports(taken, pack_progress([LaneState().progress]), {})

    rules = StreamDataset(range(9), iter, 2, time_steps=1, deterministic=False).rules
    progress = Progress(rules, 0, None, parts=2)
    progress.advance([reports(), reports((1, 1), (1, 3))])
    assert progress.last.unpack(rules).returned == (0, 2)
    assert progress.last.cursors == (4,)
    progress.advance([reports((0, 0)), reports()])
    assert progress.last.unpack(rules).returned == (2,)
