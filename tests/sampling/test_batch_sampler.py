"""`LaneBatchSampler` draws the rows that a `StreamDataLoader` reads, over the same groups."""

import itertools
import json
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import cases as random_case
from helpers import random_cases
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from stream_dataloader import LaneBatchSampler, LaneIndex, StateError, StreamDataLoader, StreamDataset, merge_states
from stream_dataloader.errors import EmptySourcesError, RankError

OPTIONS = ("time_steps", "padding_mode", "windows", "shuffle", "lookahead", "seed")


def ranges(lengths):
    return [range(end - length, end) for length, end in zip(lengths, itertools.accumulate(lengths), strict=True)]


@st.composite
def cases(draw, modes=("zeros", "data", "drop", "cycle")):
    """Lengths, options of a schedule, lanes of a rank, groups, ranks."""
    case = draw(random_case(max_streams=20, max_length=9, max_lanes=4, modes=modes))
    lengths = [max(length, 1) if case.padding_mode == "cycle" else length for length in case.lengths]
    total = draw(st.integers(1, min(4, len(lengths))))
    lanes = min(case.lanes, len(lengths) // total) if case.padding_mode == "drop" else case.lanes
    options = {name: getattr(case, name) for name in OPTIONS}
    options["schedule"] = draw(st.sampled_from([None, "longest_first", "balanced"]))
    options["shuffle"] |= options["schedule"] == "balanced"
    world_size = draw(st.sampled_from([size for size in range(1, total + 1) if total % size == 0]))
    return lengths, options, lanes * total // world_size, total, world_size


def sampler_of(case, rank=0, **others):
    lengths, options, lanes, total, world_size = case
    return LaneBatchSampler(
        lanes, lengths=lengths, virtual_ranks=total, rank=rank, world_size=world_size, **options, **others
    )


def loader_of(case, rank=0, **others):
    lengths, options, lanes, total, world_size = case
    dataset = StreamDataset.from_map_style(np.arange(sum(lengths)), ranges(lengths), lanes, fill_value=-1, **options)
    return StreamDataLoader(dataset, virtual_ranks=total, rank=rank, world_size=world_size, **others)


def check_rows(batch, indices, lengths):
    """The indices are those of a batch, and a cell that it pads has a valid index that is masked."""
    steps, lanes = batch.mask.shape
    assert len(indices) == steps * lanes
    for number, index in enumerate(indices):
        t, lane = divmod(number, lanes)
        assert (index.t, index.lane) == (t, lane)
        assert (index.mask, index.is_first) == (batch.mask[t, lane], batch.is_first[t, lane])
        assert {type(index.mask), type(index.is_first), type(index.is_last)} == {bool}
        if batch.source_index[t, lane] >= 0:
            assert index == batch.data[t, lane]
        else:
            assert 0 <= index < sum(lengths)
            assert t == 0 or index == indices[number - lanes]


def without_items(state):
    """A loader's state without what its items look like, which a sampler does not know."""
    return {name: (*value[:4], *value[5:]) if name.startswith("group_") else value for name, value in state.items()}


@random_cases(1000, 20)
@given(cases())
def test_rows_are_those_of_a_loader(case):
    lengths, options, *_, world_size = case
    if not sum(lengths):
        assert list(sampler_of(case)) == []
        return
    for rank in range(world_size):
        sampler, loader = sampler_of(case, rank), loader_of(case, rank)
        if options["padding_mode"] == "cycle":
            read = zip(itertools.islice(loader, 12), itertools.islice(sampler, 12), strict=True)
        else:
            assert len(sampler) == len(loader)
            if not has_items(sampler_of(case, rank)):  # it does not know what to pad
                with pytest.raises(RankError):
                    list(loader)
                continue
            read = zip(loader, sampler, strict=True)
        for number, (batch, indices) in enumerate(read):
            check_rows(batch, indices, lengths)
            assert without_items(sampler.state_dict(number + 1)) == without_items(batch.state_dict())


def has_items(sampler):
    """Whether a rank reads any item, or is left without a batch."""
    batches = list(sampler)
    return not batches or any(index.mask for indices in batches for index in indices)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"time_steps": 3}, "time_steps 2"), ({"lengths": [3, 2, 4]}, "sources 2"), ({"weights": [1, 2]}, r"weights \[1")],
)
def test_a_state_of_other_options_is_refused_without_a_remedy_that_it_has_not(options, said):
    usual = {"batch_size": 2, "time_steps": 2, "lengths": [3, 2]}
    if "weights" in options:
        usual |= {"members": [0, 1]}
    sampler = LaneBatchSampler(**usual)
    next(iter(sampler))
    with pytest.raises(StateError, match=said) as refused:
        LaneBatchSampler(**{**usual, **options}).load_state_dict(sampler.state_dict())
    assert "changes=" not in str(refused.value)


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([0, 1], r"members has 2 numbers, and there are 3 groups"),
        ([0, 2, 2], r"members\[1\] is 2, and members\[0\] is 0"),
        ([0, 1, 0], r"members\[2\] is 0, and members\[1\] is 1"),
        ([1, 1, 1], r"members\[0\] is 1, and datasets are counted from 0"),
        ([-1, 0, 1], r"members\[0\] is -1"),
        ("001", r"members is '001', a str"),
        ([0.0, 1.0, 1.0], "pass one integer for each group"),
        (None, "weights= says how to draw from several datasets, and members= is missing"),
    ],
)
def test_members_that_do_not_fit_the_groups_are_refused(members, said):
    with pytest.raises((TypeError, ValueError), match=said):
        LaneBatchSampler(2, lengths=[1, 2, 3], members=members, weights=[1, 2])


@random_cases(600, 12)
@given(cases(), st.data())
def test_a_state_as_of_any_batch_goes_on_from_there_on_any_rank(case, data):
    _, options, *_, world_size = case
    ranks = range(world_size)
    whole = [list(itertools.islice(sampler_of(case, rank), 12)) for rank in ranks]
    saved = data.draw(st.sampled_from(ranks))
    sampler = sampler_of(case, saved)
    drawn = list(itertools.islice(sampler, data.draw(st.integers(0, len(whole[saved])))))
    step = data.draw(st.integers(0, len(drawn)))
    state = json.loads(json.dumps(sampler.state_dict(step if drawn else None)))
    for rank in ranks:
        resumed, expected = sampler_of(case, rank), plain(whole[rank][step:])
        resumed.load_state_dict(state)
        if drawn and step == len(whole[rank]) and options["padding_mode"] != "cycle":
            expected = sampler_of(case, rank)
            expected.set_epoch(1)
            expected = plain(expected)[:12]
        assert plain(itertools.islice(resumed, len(expected))) == expected
        if rank == saved and len(drawn) < len(whole[rank]):
            assert resumed.state_dict(len(whole[rank])) == sampler_after(case, rank, len(whole[rank])).state_dict()


def test_behind_a_state_or_set_epoch_a_sampler_that_was_read_is_as_a_new_one():
    def build(seed):
        return LaneBatchSampler(2, 2, lengths=[9, 4, 4, 3, 2], shuffle=True, seed=seed)

    used, new, saved = build(0), build(1), build(1)
    list(used)
    next(batches := iter(saved))
    next(batches)
    for sampler in (used, new):
        sampler.load_state_dict(saved.state_dict())
        assert sampler.state_dict(2) == sampler.state_dict() == saved.state_dict()
        assert len(sampler) == len(saved) == 8, "the whole epoch's"
        assert plain(sampler) == plain(build(1))[2:]
        for epoch in (2, 0, 3):
            sampler.set_epoch(epoch)
            assert len(sampler) == len(list(sampler)), f"epoch {epoch}"


def sampler_after(case, rank, steps):
    sampler = sampler_of(case, rank)
    list(itertools.islice(sampler, steps))
    return sampler


def plain(batches):
    return [[(int(i), i.lane, i.t, i.is_first, i.mask) for i in batch] for batch in batches]


@random_cases(200, 12)
@given(cases(modes=("cycle",)), st.integers(1, 6), st.data())
def test_epochs_of_n_batches_are_those_of_a_loader(case, n, data):
    sampler, loader = sampler_of(case, batches_per_epoch=n), loader_of(case, batches_per_epoch=n)
    assert len(sampler) == n
    for _ in range(3):
        assert without_items(sampler.state_dict()) == without_items(loader.state_dict())
        drawn = list(sampler)
        for used, (indices, batch) in enumerate(zip(drawn, loader, strict=True)):
            check_rows(batch, indices, case[0])
            assert without_items(sampler.state_dict(used + 1)) == without_items(batch.state_dict())
    used = data.draw(st.integers(0, n))
    resumed = sampler_of(case, batches_per_epoch=n)
    resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict(used))))
    assert plain(resumed) == (plain(drawn[used:]) if used < n else plain(sampler))


def test_states_pass_between_ranks_and_to_a_loader():
    lengths, options = [5, 3, 8, 1, 4, 6, 2, 7], {"time_steps": 2, "padding_mode": "zeros", "shuffle": True, "seed": 3}
    whole = list(sampler_of((lengths, options, 4, 4, 1)))
    merged = merge_states([sampler_after((lengths, options, 2, 4, 2), rank, 3).state_dict() for rank in range(2)])
    for rank in range(4):
        sampler = sampler_of((lengths, options, 1, 4, 4), rank)
        sampler.load_state_dict(merged)
        assert [list(batch) for batch in sampler] == [[*batch[rank::4]] for batch in whole[3:]]
    loader = loader_of((lengths, options, 4, 4, 1))
    loader.load_state_dict(merged)
    for batch, indices in zip(loader, whole[3:], strict=True):
        check_rows(batch, indices, lengths)


class Marked(Dataset):
    """An item says what its index knows."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor([index, index.lane, index.t, index.is_first, index.mask])


@pytest.mark.parametrize("workers", [0, 2])
def test_torchs_own_loader_hands_the_indices_to_the_dataset(workers):
    sampler = LaneBatchSampler(2, 2, lengths=[5, 3, 4])
    loader = DataLoader(Marked(), batch_sampler=sampler, num_workers=workers)
    assert len(loader) == 4
    lanes = torch.stack(list(loader)).unflatten(1, (2, 2)).flatten(0, 1).transpose(0, 1)  # (B, all steps, 5)
    assert lanes[0].tolist() == [
        *([0, 0, 0, 1, 1], [1, 0, 1, 0, 1], [2, 0, 0, 0, 1], [3, 0, 1, 0, 1]),
        *([4, 0, 0, 0, 1], [4, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0]),
    ]
    assert lanes[1].tolist() == [
        *([5, 1, 0, 1, 1], [6, 1, 1, 0, 1], [7, 1, 0, 0, 1], [7, 1, 1, 0, 0]),
        *([8, 1, 0, 1, 1], [9, 1, 1, 0, 1], [10, 1, 0, 0, 1], [11, 1, 1, 0, 1]),
    ]


def test_a_batch_is_a_list_of_plain_integers_to_c_code():
    batch = next(iter(LaneBatchSampler(2, 2, groups=[[4, 2], [9, 7, 8]], allow_partial=True)))
    assert isinstance(batch, list)
    for found in (batch, torch.tensor(batch).tolist(), np.asarray(batch).tolist(), json.loads(json.dumps(batch))):
        assert found == [4, 9, 2, 7]
    assert {type(index) for index in (*batch, batch[-1], *batch[1:3], *batch.copy())} == {LaneIndex}
    assert (batch[-1].lane, batch[-1].t, batch[0].is_first, batch[-1].is_first) == (1, 1, True, False)
    with pytest.raises(IndexError):
        batch[4]

    assert plain([pickle.loads(pickle.dumps(batch))]) == plain([batch])
    assert len(pickle.dumps(batch)) < 300
    one = pickle.loads(pickle.dumps(batch[1]))
    assert (one, one.lane, one.t, one.is_first, one.mask) == (9, 1, 0, True, True)


def test_the_state_as_of_each_batch_of_a_long_run_is_that_of_a_loader():
    """Places are kept now and then, of blocks of more and more batches: a state is found from the one before it."""
    options = {"time_steps": 2, "padding_mode": "cycle", "shuffle": True, "seed": 5}
    sampler, loader = (make(([4, 3, 5, 2], options, 2, 1, 1)) for make in (sampler_of, loader_of))
    list(itertools.islice(sampler, 70))
    batches = list(itertools.islice(loader, 70))
    for batch in batches:
        assert without_items(sampler.state_dict(batch.batch_index + 1)) == without_items(batch.state_dict())
    assert plain(itertools.islice(pickle.loads(pickle.dumps(sampler)), 3)) == plain(itertools.islice(sampler, 3))


TWO = {"lengths": [5, 3]}
WRONG = [
    ({}, "neither groups nor lengths is given; pass groups=.*, or lengths="),
    ({"groups": [0, 0, 1], "lengths": [2, 1]}, "groups and lengths are both given; pass groups=.*, or lengths="),
    ({"lengths": []}, "lengths is empty"),
    ({"groups": []}, "groups is empty"),
    (TWO | {"dataset_length": 7}, "add up to 8, and the dataset has 7 items; correct them, or pass groups="),
    (TWO | {"dataset_length": 9}, "index 8.*allow_partial=True"),
    (TWO | {"order": range(8)}, "order= sorts the indices of equal ids, and lengths="),
    (TWO | {"batches_per_epoch": 2}, "needs padding"),
    (TWO | {"time_steps": 0}, "time_steps"),
    ({"groups": ["b", "a", "b"]}, r"id 'b' at index 0, and, with other ids between, again at index 2.*order="),
    ({"groups": [7, 7, 4], "dataset_length": 18}, "3 ids, and the dataset 18 items.* add up to 18"),
    (TWO | {"rank": 1}, "pass both, or neither"),
    (TWO | {"rank": 0, "world_size": 3}, "2 sources for 3 virtual ranks"),
    (TWO | {"rank": 0, "world_size": 2, "virtual_ranks": 3}, "virtual_ranks is 3, which 2 ranks cannot share evenly"),
    (TWO | {"virtual_ranks": 0}, "virtual_ranks is 0"),
    (TWO | {"rank": 0, "world_size": 2, "shuffle": True}, "same seed="),
]


def test_a_flat_list_is_taken_for_what_its_name_says():
    ids, lengths = LaneBatchSampler(1, groups=[5, 5, 5, 3]), LaneBatchSampler(1, lengths=[3, 1])
    assert plain(ids) == plain(lengths)
    for lists in ([[0, 1, 2], [3]], [range(3), range(3, 4)], torch.tensor([9, 9, 9, 2]), iter(["a", "a", "a", "b"])):
        assert plain(LaneBatchSampler(1, groups=lists)) == plain(lengths)
    for same in (np.array([3, 1]), torch.tensor([3, 1]), iter([3, 1])):
        assert plain(LaneBatchSampler(1, lengths=same)) == plain(lengths)
    for wrong in ({"lengths": 3}, {"groups": 3}, {"lengths": "31"}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            LaneBatchSampler(1, **wrong)


def test_batches_end_as_those_of_a_dataset_do():
    sampler, lengths = LaneBatchSampler(2, 2, lengths=[3, 2, 3]), [3, 2, 3]
    loader = StreamDataLoader(StreamDataset(lengths, range, 2, time_steps=2))
    assert len(sampler) == len(list(sampler)) == len(list(loader)) == 3


@pytest.mark.parametrize(("given", "text"), WRONG)
def test_what_does_not_fit_is_refused(given, text):
    with pytest.raises(ValueError, match=text):
        LaneBatchSampler(2, **given)
    endless = LaneBatchSampler(1, lengths=[0, 0], padding_mode="cycle")
    with pytest.raises(EmptySourcesError):
        next(iter(endless))
    with pytest.raises(TypeError):
        len(endless)


def test_states_that_do_not_fit_are_refused():
    def build(lengths, time_steps):
        return sampler_of((lengths, {"time_steps": time_steps, "padding_mode": "zeros"}, 2, 1, 1))

    sampler = build([5, 3], 1)
    list(itertools.islice(sampler, 2))
    with pytest.raises(ValueError, match="after 3 batches is not known"):
        sampler.state_dict(3)
    for lengths, time_steps, text in [([5, 4], 1, "9 indices in 2 groups"), ([5, 3], 2, "time_steps")]:
        with pytest.raises(StateError, match=text):
            build(lengths, time_steps).load_state_dict(sampler.state_dict())


def test_ranks_are_asked_of_torch_distributed(monkeypatch):
    def build(**options):
        return LaneBatchSampler(2, 2, lengths=[5, 3, 4, 6], seed=0, **options)

    expected, late = plain(build(rank=1, world_size=2)), build()
    with monkeypatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: True)
        patch.setattr(dist, "get_rank", lambda _group=None: 1)
        patch.setattr(dist, "get_world_size", lambda _group=None: 2)
        assert plain(late) == expected
    elsewhere = pickle.loads(pickle.dumps(late))
    for sampler, rows in ((late, expected), (elsewhere, plain(build()))):
        sampler.set_epoch(0)
        assert plain(sampler) == rows, "this process keeps its rank, and another one does not have it"


def test_another_number_for_a_running_epoch_is_told():
    sampler = LaneBatchSampler(1, lengths=[1, 2], padding_mode="cycle", batches_per_epoch=2)
    first = list(sampler)
    sampler.set_epoch(1)
    list(sampler)
    sampler.set_epoch(7)
    with pytest.warns(RuntimeWarning, match=r"set_epoch\(7\) was called, and epoch 2 comes next"):
        list(sampler)
    sampler.set_epoch(0)
    assert list(sampler) == first
