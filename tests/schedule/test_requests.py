"""Requests: those that one lane holds ahead, and what those of several lanes draw."""

import itertools
import random

import pytest

from stream_dataloader import StreamDataset
from stream_dataloader._engine.memory.fields import Carver
from stream_dataloader._engine.schedule.draws import Draws, next_draw
from stream_dataloader._engine.schedule.follower import Follower, LaneReports, pack_progress
from stream_dataloader._engine.schedule.place import LanePlace, Place
from stream_dataloader._engine.schedule.requests import Ledger
from stream_dataloader._engine.schedule.rules import NEVER, NONE, PENDING


def ledger_of(sources=100, lanes=2, lookahead=1):
    rules = StreamDataset(range(sources), iter, lanes, time_steps=1, lookahead=lookahead, seed=0)._rules
    ledger = Ledger(Carver(None), rules)
    return ledger, Draws(rules, Place(0), ledger.cursors)


def take(ledger, lane, time, ahead=False):
    request = lane, ledger.take(lane, time, ahead)
    ledger.show([lane])
    return request


def decisions(ledger, *requests):
    return [ledger.decision(lane, request) for lane, request in requests]


@pytest.mark.parametrize("seed", range(5))
def test_the_outcome_does_not_depend_on_who_comes_first(seed):
    """Each lane takes its requests in order of time, lanes in any; the horizon follows the one that is behind."""
    rng, (ledger, draws) = random.Random(seed), ledger_of(sources=18, lanes=3, lookahead=7)
    to_take = [[step * 3 + lane for step in range(8)] for lane in range(3)]
    taken = {}
    while any(to_take):
        lane = rng.choice([lane for lane in range(3) if to_take[lane]])
        time = to_take[lane].pop(0)
        taken[time] = take(ledger, lane=lane, time=time, ahead=time % 2 == 0)
        ledger.decide(horizon=min([times[0] - 1 for times in to_take if times], default=NEVER), draws=draws)
    # the tail begins with twelve drawn: requests ahead, at even times, are refused from then on
    late = [[NONE, draw] for draw in range(12, 18)]
    assert decisions(ledger, *(taken[time] for time in sorted(taken))) == [*range(12), *itertools.chain(*late)]


def test_no_ticket_is_decided_before_it_is_shown_and_the_horizon_has_reached_it():
    ledger, draws = ledger_of(lanes=3)  # of which the last takes none, and keeps nobody waiting
    requests = take(ledger, lane=0, time=4), (1, ledger.take(1, 7, False))
    for horizon, decided in [(0, [PENDING] * 2), (3, [PENDING] * 2), (6, [0, PENDING]), (7, [0, 1])]:
        ledger.decide(horizon, draws)
        assert decisions(ledger, *requests) == decided
        ledger.show([1])
        assert ledger.has_undecided() == (PENDING in decided)


def test_a_ticket_that_is_not_decided_is_waited_for():
    requests = {PENDING - 1: 5, PENDING - 2: NONE, PENDING - 3: 6}
    taken = iter(requests)
    assert next_draw((), 1, lambda ahead: next(taken), requests.get) == (5, (PENDING - 2,))
    assert next_draw((PENDING - 2,), 1, lambda ahead: next(taken, PENDING - 3), requests.get) == (6, None)


def test_grants_that_others_took_and_did_not_deliver_are_saved_to_be_given_again():
    """First come, first served: the worker of lane 0 took draws 0 and 2, and its part has not come."""

    def reports(*taken):
        return LaneReports(taken, pack_progress([LanePlace().progress]), {})

    rules = StreamDataset(range(9), iter, 2, time_steps=1, deterministic=False)._rules
    follower = Follower(rules, Place(0), parts=2)
    follower.advance([reports(), reports((1, 1), (1, 3))])
    assert follower.last.unpack().returned == (0, 2)
    assert follower.last.cursors == (4,)
    follower.advance([reports((0, 0)), reports()])
    assert follower.last.unpack().returned == (2,)
