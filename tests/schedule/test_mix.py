"""The order of draws from several lists: pure functions."""

import itertools
import math

import numpy as np
import pytest
from helpers import random_cases
from hypothesis import given
from hypothesis import strategies as st

from stream_dataloader._engine.schedule.mix import DrawOrder, Mix, Replaced
from stream_dataloader._engine.schedule.weights_check import asked_draws, checked_weights


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


def mix_of(sizes, weights, exhausted="leave_out", past=()):
    """A mix by constant weights, or by a schedule of them."""
    scheduled = tuple(weights) if isinstance(weights[0], tuple) else ((0, tuple(weights)),)
    return Mix(tuple(sizes), scheduled, exhausted, (False,) * len(sizes), (None,) * len(sizes), past)


def order_of(sizes, weights, exhausted="leave_out", seed=None, epoch=0, **options):
    mix = mix_of(sizes, weights, exhausted)
    return DrawOrder(mix, seed, epoch, **options), None if options.get("endless") else mix.draws


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


# Weights that change


def due_by_the_model(sizes, weights, exhausted, first=0, begin=None, most=math.inf):
    """Yield `(due, list, number)`, one draw after the other, in small steps of time: from one event to the next."""
    lists = range(len(sizes))
    drawn = list(begin or [0] * len(sizes))  # of each list
    counts = [float(count) for count in drawn]  # by their shares
    time, made = float(first), float(first)
    while made < most:
        row = [row for draw, row in weights if draw <= made + 1e-9][-1]
        later = [draw for draw, _ in weights if draw > made + 1e-9]
        left = [exhausted != "leave_out" or sizes[i] - counts[i] > 1e-9 for i in lists]
        if not any(left):
            return
        if not any(row[i] for i in lists if left[i]):
            row = [1 - (row[i] > 0) for i in lists]
        shares = [weight / math.fsum(row) for weight in row]
        ends = [(drawn[i] + 0.5 - counts[i]) / shares[i] for i in lists if shares[i] and left[i]]
        if exhausted == "leave_out":
            ends += [(sizes[i] - counts[i]) / shares[i] for i in lists if shares[i] and left[i]]
        rate = math.fsum(shares[i] for i in lists if left[i])
        ends += [(draw - made) / rate for draw in later[:1]]
        passed = min(end for end in ends if end > 1e-12)
        for i in lists:
            counts[i] += shares[i] * passed
            if exhausted == "leave_out":
                counts[i] = min(counts[i], sizes[i])
        time, made = time + passed, made + rate * passed
        for i in lists:
            if drawn[i] + 0.5 <= counts[i] + 1e-9:
                yield time, i, drawn[i]
                drawn[i] += 1


def check_against_the_model(order, first, count, expected):
    """The draws are those of the model, in the order of when they are due, but for those due at one moment."""
    due = {(number, place): time for time, number, place in expected}
    found = [order[draw] for draw in range(first, first + count)]
    times = [due[one] for one in found]
    assert len(set(found)) == count
    assert all(one <= other + 1e-6 for one, other in itertools.pairwise(times))
    assert max(times) <= min((time for one, time in due.items() if one not in set(found)), default=math.inf) + 1e-6


@st.composite
def schedules(draw, lists, ends=True):
    """Weights from some draws on; each list has some, and at the end all do, if `ends`."""
    numbers = sorted(draw(st.sets(st.integers(1, 60), max_size=4)))
    weight = st.sampled_from([0, 0, 1, 2, 3]) | st.floats(0.1, 10)
    rows = [draw(st.lists(weight, min_size=lists, max_size=lists).filter(any)) for _ in numbers]
    rows.append(draw(st.lists(st.floats(0.1, 10), min_size=lists, max_size=lists)))
    if not ends and len(rows) > 1:
        rows = rows[::-1]
    return tuple(zip([0, *numbers], map(tuple, rows), strict=True))


@random_cases(500)
@given(sizes_of, st.data(), st.sampled_from(["leave_out", "repeat", "endless"]))
def test_draws_by_a_schedule_are_those_of_the_model(sizes, data, exhausted):
    weights = data.draw(schedules(len(sizes), ends=exhausted != "endless" or data.draw(st.booleans())))
    order, draws = order_of(sizes, weights, exhausted.replace("endless", "repeat"), endless=exhausted == "endless")
    count = 200 if exhausted == "endless" else draws
    expected = list(due_by_the_model(sizes, weights, exhausted, most=count + 3 * len(sizes) + 3))
    check_against_the_model(order, 0, count, expected)
    if exhausted == "repeat":
        counts = np.bincount([order[draw][0] for draw in range(draws)], minlength=len(sizes))
        assert (counts >= sizes).all()
        assert (counts <= np.array(sizes) + 1).any(), "it ended later than when all were drawn once in full"


@random_cases(300)
@given(sizes_of, st.data(), st.integers(0, 1 << 40) | st.none(), st.sampled_from(["leave_out", "repeat", "endless"]))
def test_weights_that_replace_others_move_no_draw_before(sizes, data, seed, exhausted):
    """As often as they are replaced, in any epoch; and behind, they count on from there."""
    endless, name = exhausted == "endless", exhausted.replace("endless", "repeat")
    weights = data.draw(schedules(len(sizes)))
    mix = mix_of(sizes, weights, name)
    for _ in range(data.draw(st.integers(1, 3))):
        before = DrawOrder(mix, seed, 4, endless=endless)
        least = mix.past[-1].draw + 1 if mix.past else 1
        first = data.draw(st.integers(least, 70 + least if endless else max(least, mix.draws)))
        if not endless and first > mix.draws:
            return
        counts = before.counts_before(first)
        head = [before[draw] for draw in range(first)]
        assert list(counts) == np.bincount([number for number, _ in head], minlength=len(sizes)).tolist()
        new = data.draw(schedules(len(sizes)))
        mix = mix_of(sizes, new, name, (*mix.past, Replaced(4, first, counts, mix.weights, mix.sizes)))
        order = DrawOrder(mix, seed, 4, endless=endless)
        draws = first + 60 if endless else mix.draws
        assert [order[draw] for draw in range(first)] == head
        if seed is None and draws > first:
            expected = due_by_the_model(sizes, new, exhausted, first, counts, draws + 3 * len(sizes) + 3)
            check_against_the_model(order, first, draws - first, list(expected))
        drawn = [order[draw] for draw in range(draws)]
        assert len(set(drawn)) == draws
        for number, size in enumerate(sizes):
            numbers = [place for one, place in drawn if one == number]
            assert numbers == list(range(len(numbers))) or seed is not None
            assert sorted(numbers) == list(range(len(numbers)))
            assert endless or len(numbers) >= size
        assert [DrawOrder(mix, seed, 5, endless=endless)[draw] for draw in range(9 if endless else 0)] == [
            DrawOrder(mix_of(sizes, new, name), seed, 5, endless=endless)[draw] for draw in range(9 if endless else 0)
        ], "the next epoch is read by the new ones alone"


@pytest.mark.parametrize("seed", [None, 3])
def test_a_schedule_keeps_to_its_shares_through_many_blocks(seed):
    sizes, count = [900, 20, 7], 60_000
    weights = ((0, (5, 0.03, 2.2)), (20_000, (0, 1, 1)), (50_000, (1, 0, 1)))
    order, _ = order_of(sizes, weights, "repeat", seed, endless=True)
    lists = np.array([order[draw][0] for draw in range(count)])
    shares = np.zeros((count, 3))
    for draw, row in weights:
        shares[draw:] = np.array(row) / sum(row)
    off = np.stack([np.cumsum(lists == i) for i in range(3)], axis=1) - np.cumsum(shares, axis=0)
    assert abs(off).max() < 4
    assert (lists[20_004:50_000] != 0).all()
    assert (lists[50_004:] != 1).all()
    again, _ = order_of(sizes, weights, "repeat", seed, endless=True)
    places = np.random.default_rng(0).integers(0, count, 200).tolist()
    assert [again[draw][0] for draw in places] == lists[places].tolist()


def test_a_function_is_asked_for_each_of_the_first_draws_and_then_128_times_while_they_double():
    asked = list(asked_draws(1 << 30))
    assert asked[:300] == [*range(256), *range(256, 344, 2)]
    assert len([draw for draw in asked if 2**20 <= draw < 2**21]) == 128
    assert len(asked) == 256 + 128 * 22
    weights = checked_weights(lambda draw: [1, draw // 100], [5, 5], ends=None, means=None)
    by_hand = checked_weights([(draw, [1, draw // 100]) for draw in asked], [5, 5], ends=None, means=None)
    assert weights == by_hand
    assert [draw for draw, _ in weights[:3]] == [0, 100, 200]


@pytest.mark.parametrize(
    ("sizes", "weights", "exhausted", "expected"),
    [
        ([2, 3], ((0, (1, 0)), (9, (1, 1))), "leave_out", "aabbb"),  # b alone is left, though it has no weight
        ([3, 2, 2], ((0, (1, 0, 0)),), "leave_out", "aaabcbc"),
        ([2, 4], ((0, (1, 0)), (1, (1, 3)), (3, (0, 1))), "leave_out", "ababbb"),
        ([1, 1], ((0, (1, 1)), (1, (0, 1)), (3, (1, 1))), "repeat", "abbb"),  # a is due before it has no weight
        ([2, 2], ((0, (1, 0)), (4, (0, 1))), "repeat", "aaaabb"),
    ],
)
def test_schedules_give_these_draws(sizes, weights, exhausted, expected):
    order, draws = order_of(sizes, weights, exhausted)
    assert "".join("abc"[order[draw][0]] for draw in range(draws)) == expected
