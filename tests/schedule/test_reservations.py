"""The tickets that one lane holds ahead, by themselves."""

import itertools

import pytest

from stream_dataloader._schedule.reservations import Reservations


class Desk:
    """Hands out tickets, numbered from 0."""

    def __init__(self):
        self._numbers = itertools.count()
        self.taken = 0

    def reserve(self):
        self.taken += 1
        return next(self._numbers)


@pytest.mark.parametrize("lookahead", [1, 2, 3])
def test_a_lane_that_starts_takes_one_more_than_it_holds(lookahead):
    desk, reservations = Desk(), Reservations(lookahead)
    assert reservations.next(desk.reserve) == 0
    assert desk.taken == lookahead + 1
    assert reservations.held == tuple(range(1, lookahead + 1))


@pytest.mark.parametrize("lookahead", [1, 2, 3])
def test_each_stream_is_followed_by_one_more_ticket(lookahead):
    desk, reservations = Desk(), Reservations(lookahead)
    for number in range(10):
        assert reservations.next(desk.reserve) == number, "in the order they were taken"
        assert desk.taken == number + 1 + lookahead
        assert len(reservations.held) == lookahead


def test_without_lookahead_there_are_none():
    desk, reservations = Desk(), Reservations(lookahead=0)
    assert reservations.held is None
    assert reservations.next(desk.reserve) is None
    assert desk.taken == 0


def test_those_that_are_held_at_the_end_are_given_back():
    desk, reservations = Desk(), Reservations(lookahead=2)
    reservations.next(desk.reserve)
    assert reservations.end() == (1, 2)
    assert reservations.held is None
    assert reservations.next(desk.reserve) is None
    assert desk.taken == 3, "no ticket is taken ahead any more"
    assert reservations.end() == ()


@pytest.mark.parametrize("held", [(7, 9), ()])
def test_a_lane_goes_on_with_what_it_held(held):
    desk, reservations = Desk(), Reservations(lookahead=2, held=held)
    assert reservations.held == held
    first = reservations.next(desk.reserve)
    assert [first, *reservations.held] == [*held, *range(desk.taken)]
    assert desk.taken == (1 if held else 3)


def test_a_lane_that_had_ended_goes_on_without():
    desk, reservations = Desk(), Reservations(lookahead=2, held=None)
    assert reservations.next(desk.reserve) is None
    assert desk.taken == 0
