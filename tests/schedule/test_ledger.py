"""The ledger by itself: tickets of several lanes, and what they are granted."""

import dataclasses
import itertools
import random

import pytest

from stream_dataloader import StreamDataset
from stream_dataloader._memory.fields import Carver
from stream_dataloader._schedule.rules import NEVER, NONE, PENDING, Groups
from stream_dataloader._schedule.tickets import Ledger


def ledger_of(sources=100, lanes=2, lookahead=1, padding_mode="zeros", groups=None, memory=None):
    rules = StreamDataset(range(sources), iter, lanes, padding_mode, time_steps=1, lookahead=lookahead, seed=0).rules
    if groups is not None:
        rules = dataclasses.replace(rules, groups=groups)
    return Ledger(Carver(memory), rules)


def take(ledger, lane, time, ahead=False):
    return lane, ledger.take(lane, time, ahead)


def decisions(ledger, tickets):
    return [ledger.decision(lane, ticket) for lane, ticket in tickets]


def test_tickets_are_granted_in_order_of_time_not_of_coming():
    ledger = ledger_of(lanes=3)
    tickets = [take(ledger, lane=2, time=5), take(ledger, lane=0, time=3), take(ledger, lane=1, time=4)]
    ledger.grant(horizon=5)
    assert decisions(ledger, tickets) == [2, 0, 1]


def test_a_lanes_own_tickets_are_granted_in_the_order_they_were_taken():
    ledger = ledger_of(lookahead=2)
    tickets = [take(ledger, lane=0, time=0, ahead=True) for _ in range(3)]
    ledger.grant(horizon=0)
    assert decisions(ledger, tickets) == [0, 1, 2]


def test_no_ticket_is_decided_before_the_horizon_has_reached_it():
    ledger = ledger_of()
    first, second = take(ledger, lane=0, time=4), take(ledger, lane=1, time=7)
    for horizon in (0, 3):
        ledger.grant(horizon)
        assert decisions(ledger, [first, second]) == [PENDING, PENDING]
    ledger.grant(horizon=6)
    assert decisions(ledger, [first, second]) == [0, PENDING]
    assert ledger.has_undecided()
    ledger.grant(horizon=7)
    assert decisions(ledger, [first, second]) == [0, 1]
    assert not ledger.has_undecided()


def test_a_lane_without_a_ticket_keeps_nobody_waiting():
    ledger = ledger_of(lanes=3)
    ticket = take(ledger, lane=2, time=2)
    ledger.grant(NEVER)
    assert decisions(ledger, [ticket]) == [0]


def test_a_ticket_remembers_its_time():
    ledger = ledger_of()
    lane, ticket = take(ledger, lane=1, time=9)
    assert ledger.time(lane, ticket) == 9


@pytest.mark.parametrize("lookahead", [0, 1, 2, 3])
def test_the_places_of_tickets_are_used_again(lookahead):
    ledger = ledger_of(lookahead=lookahead)
    granted = []
    for time in range(10):
        tickets = [take(ledger, lane=0, time=time) for _ in range(lookahead + 1)]
        ledger.grant(time)
        granted += decisions(ledger, tickets)
    assert granted == list(range(10 * (lookahead + 1)))


def test_a_lane_gets_nothing_once_all_is_granted():
    ledger = ledger_of(sources=2)
    tickets = []
    for time in range(4):
        tickets.append(take(ledger, lane=0, time=time))
        ledger.grant(time)
        assert decisions(ledger, tickets[-1:]) == [time if time < 2 else NONE]


def test_tickets_ahead_are_refused_in_the_tail_and_tickets_now_are_not():
    ledger = ledger_of(sources=6, lanes=2)  # the tail: two sources a lane
    for time, ahead, expected in [(0, True, 0), (1, True, 1), (2, True, NONE), (3, False, 2), (4, True, NONE)]:
        ticket = take(ledger, lane=0, time=time, ahead=ahead)
        ledger.grant(time)
        assert decisions(ledger, [ticket]) == [expected], f"at time {time}"


@pytest.mark.parametrize(("padding_mode", "expected"), [("zeros", NONE), ("drop", NONE), ("data", 2), ("cycle", 2)])
def test_what_comes_behind_the_last_source(padding_mode, expected):
    ledger = ledger_of(sources=2, padding_mode=padding_mode)
    ledger.start([2])
    ticket = take(ledger, lane=0, time=0)
    ledger.grant(0)
    assert decisions(ledger, [ticket]) == [expected]


def test_only_cycle_has_no_tail():
    for padding_mode, expected in [("zeros", NONE), ("data", NONE), ("cycle", 2)]:
        ledger = ledger_of(sources=2, padding_mode=padding_mode)
        ledger.start([2])
        ticket = take(ledger, lane=0, time=0, ahead=True)
        ledger.grant(0)
        assert decisions(ledger, [ticket]) == [expected], padding_mode


def test_a_ledger_goes_on_from_a_cursor():
    ledger = ledger_of()
    ledger.start([40])
    ticket = take(ledger, lane=1, time=0)
    ledger.grant(0)
    assert decisions(ledger, [ticket]) == [40]


def test_groups_have_a_cursor_each():
    ledger = ledger_of(lanes=4, groups=Groups(total=3, first=1, count=2))  # lanes 0 and 1 are of group 1
    ledger.start([5, 7])
    tickets = [take(ledger, lane=lane, time=lane) for lane in range(4)]
    ledger.grant(3)
    assert decisions(ledger, tickets) == [5 * 3 + 1, 6 * 3 + 1, 7 * 3 + 2, 8 * 3 + 2]


def test_two_ledgers_over_one_memory_are_one():
    memory = bytearray(4096)
    one, other = ledger_of(memory=memory), ledger_of(memory=memory)
    ticket = take(one, lane=0, time=3)
    assert other.has_undecided()
    other.grant(3)
    assert decisions(one, [ticket]) == [0]


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
    found = decisions(ledger, [taken[time] for time in sorted(taken)])
    # the tail begins with twelve granted: tickets ahead, at even times, are refused from then on
    late = [[NONE, grant] for grant in range(12, 18)]
    assert found == [*range(12), *itertools.chain(*late)]
