"""Where sources are cut: a pure function of (seed, epoch, source)."""

import itertools

import numpy as np
import pytest
from helpers import random_cases
from hypothesis import given
from hypothesis import strategies as st

from stream_dataloader import Sections
from stream_dataloader._engine.schedule.sections import Cut, Cuts

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
    found = [cuts.section(number, epoch) for number in range(len(cuts))]
    assert cuts.lengths(epoch).tolist() == [s.stop - s.start if s.stop >= 0 else -1 for s in found]
    assert [cuts.source(number) for number in range(len(cuts))] == [section.source for section in found]

    told = [(length, steps) for lengths, steps, _ in given for length in lengths]
    by_source = [list(group) for _, group in itertools.groupby(found, lambda section: section.source)]
    assert [group[0].source for group in by_source] == list(range(len(told)))
    for group, (length, steps) in zip(by_source, told, strict=True):
        assert (group[0].start, group[-1].stop) == (0, length)
        assert all(one.stop == other.start for one, other in itertools.pairwise(group))
        if length >= 0:
            assert [section.stop for section in group if section.ends] == [length]
            assert all(0 <= section.stop - section.start <= (steps or length) for section in group)
        if steps is None or length <= steps:
            assert len(group) == 1


@pytest.mark.parametrize("steps", [1, 2, 7, 64])
def test_any_place_is_as_likely_a_border_as_any_other(steps):
    cuts = Cuts([Cut(np.full(4000, 5 * steps), steps, jitter=True)], 3)
    of_epoch = [np.cumsum(cuts.lengths(epoch).reshape(4000, -1), axis=1) for epoch in range(4)]
    borders = np.concatenate(of_epoch).ravel()
    borders = borders[(borders > 0) & (borders < 5 * steps)]
    counts = np.bincount(borders, minlength=5 * steps)[1:]
    expected = 16_000 / steps
    assert np.abs(counts - expected).max() < 6 * expected**0.5 + 1


def test_cuts_move_from_epoch_to_epoch_seed_to_seed_and_source_to_source():
    given = Sections(10, jitter=True, lengths=[100] * 64)

    def offsets(epoch, seed):
        return [given.of(source, epoch=epoch, seed=seed)[0][1] for source in range(64)]

    first = offsets(0, 0)
    assert len(set(first)) == 10
    for other in (offsets(1, 0), offsets(0, 1), first[::-1], first[1:] + first[:1]):
        assert sum(a == b for a, b in zip(first, other, strict=True)) < 20  # 6.4 of 64 on average


def test_cuts_stay_what_they_were():
    """Saved states count on them, on any machine."""
    given = Sections(8, jitter=True, lengths=[20, 20, 3])
    assert [[given.of(source, epoch=epoch, seed=5) for source in range(3)] for epoch in (0, 1)] == [
        [[(0, 2), (2, 10), (10, 18), (18, 20)], [(0, 4), (4, 12), (12, 20)], [(0, 3)]],
        [[(0, 2), (2, 10), (10, 18), (18, 20)], [(0, 6), (6, 14), (14, 20)], [(0, 3)]],
    ]


def test_fixed_cuts_are_the_same_in_every_epoch():
    given = Sections(4, jitter=False, lengths=[10, 4, 0, 8])
    for epoch in (0, 1, 7):
        found = [given.of(source, epoch=epoch, seed=epoch) for source in range(4)]
        assert found == [[(0, 4), (4, 8), (8, 10)], [(0, 4)], [], [(0, 4), (4, 8)]]


def test_a_source_as_long_as_can_be_costs_no_more():
    found = Sections((1 << 31) - 1, jitter=True, lengths=[1 << 48]).of(0, epoch=3, seed=9)
    assert (found[0][0], found[-1][1]) == (0, 1 << 48)


@pytest.mark.parametrize(
    ("lengths", "steps", "error"),
    [
        ([5], 0, ValueError),
        ([5], 1 << 32, ValueError),
        ([5], 2.0, TypeError),
        ([5, -1], 2, ValueError),
        ([0.5], 2, ValueError),
    ],
)
def test_what_is_no_cut_is_refused(lengths, steps, error):
    with pytest.raises(error, match="steps" if lengths == [5] else "lengths"):
        Sections(steps, jitter=True, lengths=lengths)


def test_sections_of_a_source_that_is_not_there():
    with pytest.raises(IndexError, match="source 2 is out of range for 2"):
        Sections(2, jitter=True, lengths=[3, 4]).of(2, epoch=0, seed=0)
    with pytest.raises(ValueError, match=r"Sections\(2, jitter=True\) has the lengths of a dataset; pass lengths="):
        Sections(2, jitter=True).of(0, epoch=0, seed=0)
    with pytest.raises(
        ValueError, match=r"Sections\(2, lengths of 1 sources\) has the jitter of a dataset; pass jitter="
    ):
        Sections(2, lengths=[3]).of(0, epoch=0, seed=0)
