"""The tickets that one lane holds ahead, by themselves."""

import itertools

import pytest

from stream_dataloader._schedule.rules import NONE, PENDING
from stream_dataloader._schedule.tickets import next_grant


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


def test_a_lane_that_holds_none_takes_each_source_when_it_needs_it():
    desk = Desk()
    assert next_grant(None, 2, desk.take) == (0, None)
    assert desk.asked == [False]


@pytest.mark.parametrize(("refuses", "grants"), [(0, [0, 1, 2]), (3, [0, 1, 2, 3]), (4, [0, 1, 2, 3, 4])])
def test_once_one_is_refused_a_lane_takes_none_ahead_any_more(refuses, grants):
    desk, held, found = Desk(refuses), (), []
    for _ in grants:
        grant, held = next_grant(held, 2, desk.take)
        found.append(grant)
    assert found == grants
    assert held is None
    assert desk.asked.count(True) <= refuses + 3


def test_a_lane_goes_on_with_what_it_held():
    desk = Desk()
    assert next_grant((7, 9), 2, desk.take) == (7, (9, 0))
    assert desk.asked == [True]


def test_a_ticket_that_is_not_decided_is_waited_for():
    tickets = {PENDING - 1: 5, PENDING - 2: NONE, PENDING - 3: 6}
    taken = iter(tickets)
    assert next_grant((), 1, lambda ahead: next(taken), tickets.get) == (5, (PENDING - 2,))
    assert next_grant((PENDING - 2,), 1, lambda ahead: next(taken, PENDING - 3), tickets.get) == (6, None)
