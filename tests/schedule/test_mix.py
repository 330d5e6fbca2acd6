"""The order of draws from several lists: pure functions."""

import math

import numpy as np
import pytest
from helpers import random_cases
from hypothesis import given
from hypothesis import strategies as st

from stream_dataloader._schedule.mix import DrawOrder, Mix


def modelled_draws(sizes, weights, exhausted):
    """The lists drawn, one after the other, and how often each: whose draw is due first comes first."""
    shares = [weight / max(weights) for weight in weights]
    shares = [share / math.fsum(shares) for share in shares]
    turns = max(size / share for size, share in zip(sizes, shares, strict=True))
    quotas = [max(size, int(turns * share + 0.5)) for size, share in zip(sizes, shares, strict=True)]
    quotas = {"leave_out": sizes, "repeat": quotas, None: [float("inf")] * len(sizes)}[exhausted]
    drawn = [0] * len(sizes)
    while any(count < quota for count, quota in zip(drawn, quotas, strict=True)):
        due = [(count + 0.5) / share for count, share in zip(drawn, shares, strict=True)]
        going = [number for number in range(len(sizes)) if drawn[number] < quotas[number]]
        number = min(going, key=lambda number: due[number])
        yield number, drawn[number]
        drawn[number] += 1


def order_of(sizes, weights, exhausted="leave_out", seed=None, epoch=0, **options):
    mix = Mix(tuple(sizes), tuple(weights), exhausted, (False,) * len(sizes), (None,) * len(sizes))
    return DrawOrder(mix, seed, epoch, **options), mix.draws


sizes_of = st.lists(st.integers(1, 40), min_size=1, max_size=5)


@random_cases(500)
@given(sizes_of, st.data(), st.sampled_from(["leave_out", "repeat"]))
def test_even_draws_are_those_of_the_model(sizes, data, exhausted):
    weights = data.draw(st.lists(st.floats(0.1, 10) | st.integers(1, 4), min_size=len(sizes), max_size=len(sizes)))
    order, draws = order_of(sizes, weights, exhausted)
    assert [tuple(order[draw]) for draw in range(draws)] == list(modelled_draws(sizes, weights, exhausted))


def checked_draws(sizes, weights, exhausted, seed, count=None, endless=False):
    """The lists drawn, after a check that each one's draws are counted without a gap and keep to its share."""
    order, draws = order_of(sizes, weights, exhausted, seed, endless=endless)
    count = count or draws
    lists, numbers = np.array([order[draw] for draw in range(count)]).T
    shares = np.array(weights) / np.sum(weights)
    for i, (size, share) in enumerate(zip(sizes, shares, strict=True)):
        assert (numbers[lists == i] == np.arange((lists == i).sum())).all()
        counts = np.cumsum(lists == i)
        others_left = slice(None)
        if exhausted == "leave_out":  # as long as all are there
            others_left = slice(min(np.flatnonzero(lists == j)[-1] for j in range(len(sizes))))
            assert counts[-1] == size
        off = (counts - share * np.arange(1, count + 1))[others_left]
        assert abs(off).max(initial=0) <= 2 + len(sizes) * share
    return lists


@random_cases(200)
@given(sizes_of, st.data(), st.integers(0, 1 << 40) | st.none(), st.sampled_from(["leave_out", "repeat", "endless"]))
def test_each_list_has_its_share_of_any_stretch_of_draws(sizes, data, seed, exhausted):
    weights = data.draw(st.lists(st.floats(0.1, 10), min_size=len(sizes), max_size=len(sizes)))
    if exhausted == "endless":
        checked_draws(sizes, weights, "repeat", seed, 500, endless=True)
    else:
        checked_draws(sizes, weights, exhausted, seed)


@pytest.mark.parametrize("seed", [None, 5])
def test_long_orders_are_made_block_by_block(seed):
    sizes, weights, count = [900, 20, 7], [5, 0.03, 2.2], 100_000
    lists = checked_draws(sizes, weights, "repeat", seed, count, endless=True)
    again, _ = order_of(sizes, weights, "repeat", seed, endless=True)
    places = np.random.default_rng(0).integers(0, count, 300).tolist()
    assert [again[draw][0] for draw in places] == lists[places].tolist()  # in any order

    far = 10**14
    block = [again[far + draw] for draw in range(20_000)]
    for i, share in enumerate(np.array(weights) / np.sum(weights)):
        numbers = [number for one, number in block if one == i]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert abs(numbers[0] - share * far) < 4

    finite = checked_draws([30_000, 20, 7], weights, "repeat", seed)
    assert len(finite) > 40_000
    assert (finite == 0).sum() >= 30_000


def test_random_draws_are_random_and_follow_the_weights():
    weights = np.array([6, 3, 1])
    draws = checked_draws([60_000] * 3, weights, "leave_out", 0, 180_000)[:60_000]
    counts = np.bincount(draws, minlength=3)
    expected = len(draws) * weights / weights.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 13.8  # chi-square, 2 degrees of freedom: p = 0.001

    pairs, one, two = (order_of([10_000] * 2, [1, 1], seed=seed, epoch=e)[0] for seed, e in [(0, 0), (0, 1), (1, 0)])
    first = sum(pairs[2 * i][0] for i in range(10_000))  # each pair of draws has both lists, in random order
    assert abs(first - 5000) < 165  # 3.3 standard deviations
    for other in (one, two):
        assert 4000 < sum(pairs[i][0] == other[i][0] for i in range(10_000)) < 6000
