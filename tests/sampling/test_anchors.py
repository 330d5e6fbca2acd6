"""`LaneBatchSampler(anchors=...)` draws every n-th index of each group; against lists made by hand."""

import itertools
import warnings

import numpy as np
import pytest
from helpers import random_cases
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from stream_dataloader import Anchors, LaneBatchSampler, collate_lanes, lane_dataset
from stream_dataloader.errors import StateError
from stream_dataloader.recurrent import RecurrentState
from stream_dataloader.testing import audit


def by_hand(length, every, phase, first, last, ahead):
    """The anchors of a group, from the words of `Anchors`."""
    allowed = range(max(length - ahead + 1, 0))
    found = {item for item in allowed if item >= phase and (item - phase) % every == 0}
    found |= set(allowed[:1]) if first else set()
    found |= set(allowed[-1:]) if last else set()
    return sorted(found)


def spacings():
    return st.fixed_dictionaries(
        {
            "every": st.integers(1, 6),
            "phase": st.none() | st.integers(0, 7),
            "first": st.booleans(),
            "last": st.booleans(),
            "ahead": st.integers(1, 5),
        }
    )


@random_cases(2000, 60)
@given(length=st.integers(0, 20), spacing=spacings(), epoch=st.integers(0, 5), seed=st.integers(0, 99))
def test_anchors_are_those_that_the_words_say(length, spacing, epoch, seed):
    found = Anchors(**spacing, lengths=[3, length]).of(1, epoch=epoch, seed=seed)
    phases = range(spacing["every"]) if spacing["phase"] is None else [spacing["phase"]]
    rest = {name: spacing[name] for name in ("every", "first", "last", "ahead")}
    assert found in [by_hand(length, phase=phase, **rest) for phase in phases]


def test_each_phase_is_drawn_equally_often():
    anchors = Anchors(4, lengths=[50] * 400)
    phases = [anchors.of(group, epoch=epoch, seed=7)[0] for group in range(400) for epoch in range(3)]
    counts = np.bincount(phases)
    assert len(counts) == 4
    assert counts.min() > 240


@random_cases(1000, 40)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=10),
    spacing=spacings(),
    lanes=st.integers(1, 3),
    time_steps=st.integers(1, 4),
    context=st.integers(0, 4),
    windows=st.sampled_from(["aligned", "packed"]),
    scattered=st.booleans(),
    shuffle=st.booleans(),
    left=st.integers(0, 6),
)
def test_lanes_read_the_anchors_of_each_group(
    lengths, spacing, lanes, time_steps, context, windows, scattered, shuffle, left
):
    total = sum(lengths)
    indices = np.random.default_rng(0).permutation(total) if scattered else np.arange(total)
    ends = np.cumsum(lengths).tolist()
    groups = [indices[end - length : end].tolist() for end, length in zip(ends, lengths, strict=True)]
    expected = {}
    known = Anchors(**spacing, lengths=lengths)
    for epoch in range(2):
        for group, own in enumerate(groups):
            items = known.of(group, epoch=epoch, seed=5)
            if not shuffle and spacing["phase"] is None:
                items = by_hand(len(own), **spacing | {"phase": 0})
            expected[epoch, group] = [own[item] for item in items]
    if not total:
        return

    def make():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return LaneBatchSampler(
                *(lanes, time_steps), groups=groups, anchors=Anchors(**spacing), shuffle=shuffle, seed=5,
                windows=windows, context=context, dataset_length=total,
            )  # fmt: skip

    sampler, drawn = make(), []
    for epoch in range(2):
        batches = list(sampler)
        assert len(sampler) == len(batches)
        drawn.append(batches)
        found, last = {}, {}
        for batch in batches:
            cells = [cell for cell in batch if cell.source_index >= 0]
            for cell in cells:
                own = expected[epoch, cell.source_index]
                assert int(cell) == own[cell.position]
                assert cell.is_first == (cell.position == 0)
                assert cell.is_last == (cell.position == len(own) - 1 and cell.t >= context)
            for cell in (cell for cell in cells if cell.mask):
                assert cell.is_first or last[cell.lane] == (cell.source_index, cell.position - 1)
                last[cell.lane] = cell.source_index, cell.position
                found.setdefault(cell.source_index, []).append(int(cell))
        assert found == {group: own for (of, group), own in expected.items() if of == epoch and own}
    whole, resumed = make(), make()
    iterator = iter(whole)
    if left < len(drawn[0]):
        list(itertools.islice(iterator, left))
        resumed.load_state_dict(whole.state_dict(left))
        assert [told(batch) for batch in resumed] == [told(batch) for batch in drawn[0][left:]]
        assert [told(batch) for batch in resumed] == [told(batch) for batch in drawn[1]]


def told(batch):
    return [(int(cell), *vars(cell).values()) for cell in batch]


def test_ranks_share_the_anchors():
    lengths = list(range(3, 19))
    given = {"lengths": lengths, "anchors": 3, "shuffle": True, "seed": 1, "time_steps": 2}
    alone = list(LaneBatchSampler(4, **given, virtual_ranks=2))
    both = [list(LaneBatchSampler(2, **given, rank=rank, world_size=2)) for rank in range(2)]
    for whole, *halves in zip(alone, *both, strict=True):
        rows = [[int(cell) for cell in batch if cell.mask] for batch in (whole, *halves)]
        assert sorted(rows[0]) == sorted(rows[1] + rows[2])


def test_endless_lanes_draw_new_anchors_in_each_pass():
    sampler = LaneBatchSampler(
        1, 2, lengths=[40], anchors=Anchors(9, first=True), padding_mode="cycle", shuffle=True, seed=0
    )
    passes = {}
    for batch in itertools.islice(sampler, 40):
        for cell in (cell for cell in batch if cell.mask):
            if cell.is_first:
                passes[len(passes)] = []
            passes[len(passes) - 1].append(int(cell))
    assert all(own[0] == 0 for own in passes.values())
    assert len({tuple(own) for own in passes.values()}) > 3


def test_states_are_carried_from_anchor_to_anchor():
    items = [{"frame": np.int64(i)} for i in range(60)]
    sampler = LaneBatchSampler(2, 2, lengths=[20] * 3, anchors=Anchors(5, last=True), shuffle=True, seed=0)
    loader = DataLoader(lane_dataset(items), batch_sampler=sampler, collate_fn=collate_lanes)
    carry = RecurrentState(batch_dim=1)
    for batch in loader:
        state = carry.before(batch)
        carry.after(batch, batch.data["frame"][None, -1, :, None] if state is None else state)
    assert not audit(LaneBatchSampler(2, 2, lengths=[20] * 9, anchors=5, shuffle=True, seed=0)).wrong


def test_a_state_of_other_anchors_is_refused():
    given = {"lengths": [20, 30], "shuffle": True, "seed": 0}
    sampler = LaneBatchSampler(2, anchors=Anchors(5, ahead=3), **given)
    next(iter(sampler))
    for other in ({}, {"anchors": 5}, {"sections": 5}):
        with pytest.raises(StateError, match=r"Anchors\(5, ahead=3\)"):
            LaneBatchSampler(2, **given, **other).load_state_dict(sampler.state_dict())


def test_groups_without_an_anchor_are_told():
    with pytest.warns(UserWarning, match=r"1 of 2 groups have fewer items than ahead=8, and so no anchor"):
        sampler = LaneBatchSampler(1, lengths=[7, 8], anchors=Anchors(3, ahead=8, first=True))
    assert [[int(index) for index in batch] for batch in sampler] == [[7]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"anchors": 0}, "anchors, their distance, is 0, and must be at least 1"),
        ({"anchors": 3, "sections": 4}, "anchors= and sections= both say which items"),
        ({"anchors": Anchors(3, lengths=[5])}, r"anchors= has \[5\] as lengths, and the groups have others"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LaneBatchSampler(1, lengths=[9], **options)
