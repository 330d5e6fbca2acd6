"""Tickets: those that one lane holds ahead, and what those of several lanes are granted."""

import dataclasses
import itertools
import random

import pytest

from stream_dataloader import StreamDataset
from stream_dataloader._memory.fields import Carver
from stream_dataloader._schedule.rules import NEVER, NONE, PENDING, Groups
from stream_dataloader._schedule.snapshot import LaneReports, LaneState, Progress, pack_progress
from stream_dataloader._schedule.tickets import Ledger, next_grant


def ledger_of(sources=100, lanes=2, lookahead=1, padding_mode="zeros", groups=None, memory=None, start=(0,)):
    rules = StreamDataset(range(sources), iter, lanes, padding_mode, time_steps=1, lookahead=lookahead, seed=0).rules
    if groups is not None:
        rules = dataclasses.replace(rules, groups=groups)
    ledger = Ledger(Carver(memory), rules)
    ledger.start(start)
    return ledger


def take(ledger, lane, time, ahead=False):
    return lane, ledger.take(lane, time, ahead)


def decisions(ledger, *tickets):
    return [ledger.decision(lane, ticket) for lane, ticket in tickets]


@pytest.mark.parametrize("seed", range(5))
def test_the_outcome_does_not_depend_on_who_comes_first(seed):
    """Each lane takes its tickets in order of time, lanes in any; the horizon follows the one that is behind."""
    rng, ledger = random.Random(seed), ledger_of(sources=18, lanes=3, lookahead=7)
    to_take = [[step * 3 + lane for step in range(8)] for lane in range(3)]
    taken = {}
    while any(to_take):
        lane = rng.choice([lane for lane in range(3) if to_take[lane]])
        time = to_take[lane].pop(0)
        taken[time] = take(ledger, lane=lane, time=time, ahead=time % 2 == 0)
        ledger.grant(horizon=min([times[0] - 1 for times in to_take if times], default=NEVER))
    # the tail begins with twelve granted: tickets ahead, at even times, are refused from then on
    late = [[NONE, grant] for grant in range(12, 18)]
    assert decisions(ledger, *(taken[time] for time in sorted(taken))) == [*range(12), *itertools.chain(*late)]


def test_no_ticket_is_decided_before_the_horizon_has_reached_it():
    ledger = ledger_of(lanes=3)  # of which the last takes none, and keeps nobody waiting
    first, second = take(ledger, lane=0, time=4), take(ledger, lane=1, time=7)
    assert ledger.time(*first) == 4
    for horizon in (0, 3):
        ledger.grant(horizon)
        assert decisions(ledger, first, second) == [PENDING, PENDING]
    ledger.grant(horizon=6)
    assert decisions(ledger, first, second) == [0, PENDING]
    assert ledger.has_undecided()
    ledger.grant(horizon=7)
    assert decisions(ledger, first, second) == [0, 1]
    assert not ledger.has_undecided()


@pytest.mark.parametrize("lookahead", [0, 1, 2, 3])
def test_the_places_of_tickets_are_used_again(lookahead):
    ledger = ledger_of(lookahead=lookahead)
    granted = []
    for time in range(10):
        tickets = [take(ledger, lane=0, time=time) for _ in range(lookahead + 1)]
        ledger.grant(time)
        granted += decisions(ledger, *tickets)
    assert granted == list(range(10 * (lookahead + 1)))


@pytest.mark.parametrize(
    ("padding_mode", "now", "ahead"), [("zeros", NONE, NONE), ("drop", NONE, NONE), ("data", 2, NONE), ("cycle", 2, 2)]
)
def test_what_comes_behind_the_last_source(padding_mode, now, ahead):
    for is_ahead, expected in ((False, now), (True, ahead)):
        ledger = ledger_of(sources=2, padding_mode=padding_mode, start=[2])
        ticket = take(ledger, lane=0, time=0, ahead=is_ahead)
        ledger.grant(0)
        assert decisions(ledger, ticket) == [expected]


def test_groups_have_a_cursor_each():
    groups = Groups(total=3, first=1, count=2)  # lanes 0 and 1 are of group 1
    ledger = ledger_of(lanes=4, groups=groups, start=[5, 7])
    tickets = [take(ledger, lane=lane, time=lane) for lane in range(4)]
    ledger.grant(3)
    assert decisions(ledger, *tickets) == [5 * 3 + 1, 6 * 3 + 1, 7 * 3 + 2, 8 * 3 + 2]


def test_two_ledgers_over_one_memory_are_one():
    memory = bytearray(4096)
    one, other = ledger_of(memory=memory), ledger_of(memory=memory)
    ticket = take(one, lane=0, time=3)
    assert other.has_undecided()
    other.grant(3)
    assert decisions(one, ticket) == [0]


class Desk:
    """Hands out grants, numbered from 0; ahead none from `refuses` on."""

    def __init__(self, refuses=100):
        self._grants = itertools.count()
        self.asked, self._refuses = [], refuses

    def take(self, ahead):
        self.asked.append(ahead)
        return NONE if ahead and len(self.asked) > self._refuses else next(self._grants)


@pytest.mark.parametrize("lookahead", [1, 2, 3])
def test_a_lane_holds_as_many_ahead_as_it_looks_ahead(lookahead):
    desk, held = Desk(), ()
    for number in range(10):
        grant, held = next_grant(held, lookahead, desk.take)
        assert grant == number, "in the order they were taken"
        assert held == tuple(range(number + 1, number + 1 + lookahead))
    assert desk.asked == [True] * (10 + lookahead)
    assert next_grant((7, 9), 2, Desk().take) == (7, (9, 0)), "it goes on with what it held"


@pytest.mark.parametrize(("refuses", "grants"), [(0, [0, 1, 2]), (3, [0, 1, 2, 3]), (4, [0, 1, 2, 3, 4])])
def test_once_one_is_refused_a_lane_takes_none_ahead_any_more(refuses, grants):
    desk, held, found = Desk(refuses), (), []
    for _ in grants:
        grant, held = next_grant(held, 2, desk.take)
        found.append(grant)
    assert found == grants
    assert held is None
    assert desk.asked.count(True) <= refuses + 3


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
