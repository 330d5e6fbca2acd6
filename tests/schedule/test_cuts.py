"""Where sources are cut: a pure function of (seed, epoch, source)."""

import collections
import itertools

import numpy as np
import pytest
from helpers import random_cases
from hypothesis import given
from hypothesis import strategies as st

from stream_dataloader import sections
from stream_dataloader._schedule.sections import Cut, Cuts

lists = st.lists(
    st.tuples(st.lists(st.integers(-1, 40), min_size=1, max_size=6), st.none() | st.integers(1, 12), st.booleans()),
    min_size=1,
    max_size=3,
)


def cuts_of(given, seed=0):
    cuts, first = [], 0
    for lengths, steps, jitter in given:
        cuts.append(Cut(np.array(lengths), steps, jitter=jitter, first=first))
        first += len(lengths)
    return Cuts(cuts, seed)


@random_cases(1000)
@given(lists, st.integers(0, 2**63 - 1), st.integers(0, 2**40))
def test_the_sections_of_a_source_are_all_of_it_in_order(given, seed, epoch):
    cuts = cuts_of(given, seed)
    by_source = collections.defaultdict(list)
    for number in range(len(cuts)):
        section = cuts.section(number, epoch)
        assert cuts.source(number) == section.source
        by_source[section.source].append(section)
    told = [(length, steps) for lengths, steps, _ in given for length in lengths]
    assert list(by_source) == list(range(len(told)))
    assert sum(map(len, by_source.values())) == len(cuts)
    for source, (length, steps) in enumerate(told):
        found = by_source[source]
        assert found[0].start == 0
        assert found[-1].stop == length
        assert all(one.stop == other.start for one, other in itertools.pairwise(found))
        if length >= 0:
            assert [section.ends for section in found].count(True) == 1
            assert all(section.stop == length for section in found if section.ends)
            assert all(0 <= section.stop - section.start <= (steps or length) for section in found)
        if steps is None or length <= steps:
            assert len(found) == 1


@random_cases(500)
@given(lists, st.integers(0, 2**63 - 1), st.integers(0, 2**40))
def test_all_at_once_they_are_those_that_are_asked_for_one_by_one(given, seed, epoch):
    cuts = cuts_of(given, seed)
    found = [cuts.section(number, epoch) for number in range(len(cuts))]
    assert cuts.starts(epoch).tolist() == [section.start for section in found]
    assert cuts.lengths(epoch).tolist() == [s.stop - s.start if s.stop >= 0 else -1 for s in found]


@pytest.mark.parametrize("steps", [1, 2, 7, 64])
def test_any_place_is_as_likely_a_border_as_any_other(steps):
    cuts = Cuts([Cut(np.full(4000, 5 * steps), steps, jitter=True)], 3)
    borders = np.concatenate([cuts.starts(epoch) for epoch in range(4)])
    borders = borders[(borders > 0) & (borders < 5 * steps)]
    counts = np.bincount(borders, minlength=5 * steps)[1:]
    expected = 16_000 / steps
    assert np.abs(counts - expected).max() < 6 * expected**0.5 + 1


def test_cuts_move_from_epoch_to_epoch_seed_to_seed_and_source_to_source():
    given = sections([100] * 64, 10)

    def offsets(epoch, seed):
        return [given.of(source, epoch=epoch, seed=seed)[0][1] for source in range(64)]

    first = offsets(0, 0)
    assert len(set(first)) == 10
    for other in (offsets(1, 0), offsets(0, 1), first[::-1], first[1:] + first[:1]):
        assert sum(a == b for a, b in zip(first, other, strict=True)) < 20  # 6.4 of 64 on average


def test_cuts_stay_what_they_were():
    """Saved states count on them, on any machine."""
    given = sections([20, 20, 3], 8)
    found = [[given.of(source, epoch=epoch, seed=5) for source in range(3)] for epoch in (0, 1)]
    assert found == KNOWN


KNOWN = [
    [[(0, 2), (2, 10), (10, 18), (18, 20)], [(0, 4), (4, 12), (12, 20)], [(0, 3)]],
    [[(0, 2), (2, 10), (10, 18), (18, 20)], [(0, 6), (6, 14), (14, 20)], [(0, 3)]],
]


def test_fixed_cuts_are_the_same_in_every_epoch():
    given = sections([10, 4, 0, 8], 4, jitter=False)
    for epoch in (0, 1, 7):
        found = [given.of(source, epoch=epoch, seed=epoch) for source in range(4)]
        assert found == [[(0, 4), (4, 8), (8, 10)], [(0, 4)], [], [(0, 4), (4, 8)]]


def test_a_source_as_long_as_can_be_costs_no_more():
    given = sections([1 << 48], (1 << 31) - 1)
    found = given.of(0, epoch=3, seed=9)
    assert found[0][0] == 0
    assert found[-1][1] == 1 << 48


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (([5], 0), ValueError, "steps is 0"),
        (([5], 1 << 32), ValueError, "at most"),
        (([5], 2.0), TypeError, "steps must be an integer"),
        (([5, -1], 2), ValueError, r"lengths\[1\] is -1"),
        (([0.5], 2), ValueError, "lengths must be 1 integers"),
    ],
)
def test_what_is_no_cut_is_refused(given, error, text):
    with pytest.raises(error, match=text):
        sections(*given)


def test_sections_of_a_source_that_is_not_there():
    with pytest.raises(IndexError, match="source 2 is out of range for 2"):
        sections([3, 4], 2).of(2, epoch=0, seed=0)
    with pytest.raises(ValueError, match=r"sections\(lengths, steps\)"):
        sections(None, 2).of(0, epoch=0, seed=0)
