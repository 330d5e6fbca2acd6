"""torch's own `DataLoader` over `lane_dataset` yields the batches of a `StreamDataLoader` over the same groups."""

import copy
import dataclasses
import functools
import itertools
import json
import pickle

import numpy as np
import pytest
import torch
from helpers import random_cases
from hypothesis import given
from hypothesis import strategies as st
from test_batch_sampler import cases, has_items, ranges, sampler_of
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from stream_dataloader import (
    LaneBatchSampler,
    StreamBatch,
    StreamDataLoader,
    StreamDataset,
    collate_lanes,
    interleave,
    lane_dataset,
)
from stream_dataloader.errors import ItemError, ReadError
from stream_dataloader.recurrent import LaneMemory, RecurrentState
from stream_dataloader.testing import audit

FIELDS = [field.name for field in dataclasses.fields(StreamBatch) if field.name not in ("data", "worker_id")]


class Recordings(Dataset):
    """Items of tensors, numbers and text; notes what it is asked for."""

    def __init__(self, length):
        self.length = length
        self.asked = []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        assert type(index) is int
        self.asked.append(index)
        return {"image": torch.full((2, 3), float(index)), "frame": index, "task": f"task {index % 3}"}


def equal(one, other):
    """Whether two values of batches are the same, with dtypes and where padded."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return one == other


def check_equal(ours, theirs):
    for name in FIELDS:
        assert equal(getattr(ours, name), getattr(theirs, name)), (name, getattr(ours, name), getattr(theirs, name))
    for key in theirs.data:
        assert equal(ours.data[key], theirs.data[key]), (key, ours.data[key], theirs.data[key])


@st.composite
def mixed_cases(draw):
    """A case, and how lanes draw from its groups as those of several datasets; {}: they are those of one."""
    case = draw(cases())
    lengths = case[0]
    members = [
        0,
        *itertools.accumulate(draw(st.lists(st.integers(0, 1), min_size=len(lengths) - 1, max_size=len(lengths) - 1))),
    ]
    count = members[-1] + 1
    some = st.lists(st.sampled_from([0.5, 1, 3]), min_size=count, max_size=count)
    weights = draw(
        st.none() | some | st.builds(lambda first, then, at: [(0, first), (at, then)], some, some, st.integers(1, 9))
    )
    mix = {"members": members, "weights": weights, "exhausted": draw(st.sampled_from([None, "leave_out", "repeat"]))}
    steps = all(sum(length for length, of in zip(lengths, members, strict=True) if of == one) for one in range(count))
    mix["weights_by"] = draw(st.sampled_from(["sources", "steps"])) if steps else "sources"
    return case, draw(st.sampled_from([{}, mix]))


def mixed(lengths, members, lanes, options, mix, others):
    """The dataset that interleaves those of the groups."""
    numbered = list(zip(members, ranges(lengths), strict=True))
    groups = [[group for of, group in numbered if of == one] for one in range(members[-1] + 1)]
    read, options = Recordings(sum(lengths)), {**options, **others, "allow_partial": True}
    datasets = [StreamDataset.from_map_style(read, own, 1, **options) for own in groups]  # may be fewer than lanes
    how = {name: mix[name] for name in ("weights", "weights_by", "exhausted")}
    return interleave(datasets, **how, lookahead=options["lookahead"], batch_size=lanes)


def loaders(case, rank=0, workers=0, mix=None, **others):
    lengths, options, lanes, total, world_size = case
    sampler = sampler_of(case, rank, **(mix or {}), **others)
    recordings = Recordings(sum(lengths))
    ours = DataLoader(
        lane_dataset(recordings),
        batch_sampler=sampler,
        collate_fn=collate_lanes,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    if mix:
        dataset = mixed(lengths, mix["members"], lanes, options, mix, others)
    else:
        dataset = StreamDataset.from_map_style(Recordings(sum(lengths)), ranges(lengths), lanes, **options, **others)
    theirs = StreamDataLoader(dataset, virtual_ranks=total, rank=rank, world_size=world_size)
    return ours, theirs, sampler


@random_cases(1000, 25)
@given(mixed_cases(), st.none() | st.integers(1, 5))
def test_batches_are_those_of_a_loader_over_the_same_groups(mixed_case, sections):
    """In two epochs, on each rank, packed and aligned, whole groups and sections of them, of several datasets."""
    case, mix = mixed_case
    lengths, options, *_, world_size = case
    if not sum(lengths):
        return
    for rank in range(world_size):
        alone = sampler_of(case, rank, sections=sections, **mix)
        if options["padding_mode"] != "cycle" and not all(has_items(alone) for _ in range(2)):
            continue  # in one of the two epochs the loader does not know what to pad
        ours, theirs, sampler = loaders(case, rank, mix=mix, sections=sections)
        for _ in range(1 if options["padding_mode"] == "cycle" else 2):
            pairs = zip(ours, theirs, strict=True)
            for one, other in itertools.islice(pairs, 8 if options["padding_mode"] == "cycle" else None):
                if one.mask.any() or one.source_index.max() >= 0:
                    check_equal(one, other)
                    expected = other.state_dict()
                    assert {**sampler.state_dict(one), **shapes(expected)} == expected


def shapes(state):
    """What a loader's state knows of its items, which a sampler does not."""
    return {name: value for name, value in state.items() if name.startswith("group_")}


@random_cases(30, 2)
@given(cases(modes=("zeros", "data", "drop")))
def test_persistent_workers_of_torch_have_the_same_batches(case):
    lengths = case[0]
    if not sum(lengths) or not has_items(sampler_of(case)):
        return
    ours, theirs, _ = loaders(case, workers=2)
    for _ in range(2):
        for one, other in zip(ours, theirs, strict=True):
            if one.source_index.max() >= 0:
                check_equal(one, other)


@random_cases(200, 15)
@given(mixed_cases(), st.none() | st.integers(1, 5), st.data())
def test_a_state_goes_on_behind_the_batch_it_is_of(mixed_case, sections, data):
    case, mix = mixed_case
    lengths = case[0]
    if not sum(lengths):
        return
    ours, _, sampler = loaders(case, mix=mix, sections=sections)
    whole = list(itertools.islice(ours, 8))
    if not whole:
        return
    used = data.draw(st.integers(1, len(whole)))
    state = json.loads(json.dumps(sampler.state_dict(whole[used - 1])))
    resumed, _, again = loaders(case, mix=mix, sections=sections)
    again.load_state_dict(state)
    for one, other in zip(itertools.islice(resumed, len(whole) - used), whole[used:], strict=False):
        check_equal(one, other)


def small(**options):
    recordings = Recordings(9)
    sampler = LaneBatchSampler(2, 2, lengths=[5, 4], **options)
    return recordings, sampler


def test_padded_cells_cost_no_item_and_those_of_a_window_are_asked_for_together():
    recordings, sampler = small()
    list(DataLoader(lane_dataset(recordings), batch_sampler=sampler, collate_fn=collate_lanes))
    assert recordings.asked == [0, 1, 5, 6, 2, 3, 7, 8, 4]

    class Many(Recordings):
        def __getitems__(self, wanted):
            self.asked.append(wanted)
            return [super(Many, self).__getitem__(index) for index in wanted]

    many = Many(9)
    list(DataLoader(lane_dataset(many), batch_sampler=sampler, collate_fn=collate_lanes))
    assert [wanted for wanted in many.asked if isinstance(wanted, list)] == [[0, 1, 5, 6], [2, 3, 7, 8], [4]]


def test_a_state_is_carried_and_batches_left_out_are_noticed():
    recordings, sampler = small()
    batches = list(DataLoader(lane_dataset(recordings), batch_sampler=sampler, collate_fn=collate_lanes, num_workers=1))
    carry, memory = RecurrentState(batch_dim=0), LaneMemory()
    seen = torch.zeros(2)
    for batch in batches:
        state = carry.before(batch)
        seen = torch.zeros(2) if state is None else state
        seen = seen + batch.mask.sum(0)
        carry.after(batch, seen)
        for t, values in memory.steps(batch):
            for lane, value in enumerate(values):
                if value is not None:
                    value.append(int(batch.position[t, lane]))
    assert seen.tolist() == [5, 4]
    assert [memory[0], memory[1]] == [[0, 1, 2, 3, 4], [0, 1, 2, 3]]
    fresh = RecurrentState(batch_dim=0)
    fresh.before(batches[0])
    fresh.after(batches[0], torch.zeros(2))
    with pytest.raises(ValueError, match="lane 0 goes on with source 0 at position 4 in batch 2"):
        fresh.before(batches[2])


def test_a_collate_function_makes_the_leaves():
    recordings, sampler = small()
    collate = functools.partial(collate_lanes, collate_fn=default_collate, fill_value=-1)
    *_, last = DataLoader(lane_dataset(recordings), batch_sampler=sampler, collate_fn=collate)
    assert last.data["frame"].tolist() == [[4, -1], [-1, -1]]
    assert last.data["task"] == [["task 1", None], [None, None]]
    assert last.data["image"].shape == (2, 2, 2, 3)

    wrong = functools.partial(collate_lanes, collate_fn=len)
    with pytest.raises(TypeError, match="collate_fn was given 4 items, and made 4, a int"):
        list(DataLoader(lane_dataset(recordings), batch_sampler=sampler, collate_fn=wrong))


def test_a_rank_without_an_item_pads_what_others_read():
    """Ranks have as many batches as each other, so one may pad throughout; it knows what from any item."""
    sampler = LaneBatchSampler(1, 2, lengths=[4, 0], rank=1, world_size=2)
    batches = list(DataLoader(lane_dataset(Recordings(4)), batch_sampler=sampler, collate_fn=collate_lanes))
    assert len(batches) == 2
    for batch in batches:
        assert not batch.mask.any()
        assert batch.data["image"].tolist() == torch.zeros(2, 1, 2, 3).tolist()
        assert batch.data["task"] == [[None], [None]]


def test_what_does_not_know_its_lanes_is_refused():
    recordings, sampler = small()
    with pytest.raises(TypeError, match=r"do not know their lanes; wrap the dataset in lane_dataset"):
        next(iter(DataLoader(range(9), batch_sampler=sampler, collate_fn=collate_lanes)))
    with pytest.raises(TypeError, match=r"index 0 is a plain int.*pass batch_sampler=LaneBatchSampler"):
        next(iter(DataLoader(lane_dataset(recordings), batch_size=2, collate_fn=collate_lanes)))
    mapped = DataLoader(Subset(lane_dataset(recordings), range(9)), batch_sampler=sampler, collate_fn=collate_lanes)
    with pytest.raises(TypeError, match=r"index 0 is a plain int.*pass batch_sampler=LaneBatchSampler"):
        next(iter(mapped))
    with pytest.raises(TypeError, match="a generator, which has no items by index; read it with StreamDataset"):
        lane_dataset(number for number in range(3))
    with pytest.raises(TypeError, match=r"not a dict; .* use lane_dataset and collate_lanes"):
        RecurrentState().before({"data": torch.zeros(2)})


def test_a_state_is_asked_of_the_sampler():
    recordings, sampler = small()
    loader = DataLoader(lane_dataset(recordings), batch_sampler=sampler, collate_fn=collate_lanes)
    first = next(iter(loader))
    with pytest.raises(ValueError, match=r"ask sampler.state_dict\(batch\)"):
        first.state_dict()
    assert sampler.state_dict(first) == sampler.state_dict(1)
    list(loader)
    second = list(loader)
    with pytest.raises(ValueError, match="is batch 0 of epoch 0, and epoch 2 is being drawn; save the state before"):
        sampler.state_dict(first)
    assert sampler.state_dict(second[1]) == sampler.state_dict(2)


class Broken(Recordings):
    def __init__(self, broken, kind):
        super().__init__(9)
        self.broken, self.kind = broken, kind

    def __getitem__(self, index):
        if index == self.broken and self.kind == "raises":
            raise OSError("the disk is gone")
        item = super().__getitem__(index)
        if index == self.broken:
            item["image"] = torch.zeros(4)
        return item


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_name_the_group_and_the_item(workers):
    _, sampler = small()

    def read(kind):
        loader = DataLoader(
            lane_dataset(Broken(7, kind)), batch_sampler=sampler, collate_fn=collate_lanes, num_workers=workers
        )
        return list(loader)

    with pytest.raises(ReadError, match=r"dataset\[7\], item 2 of group 1 in lane 1, raised OSError: the disk is gone"):
        read("raises")
    with pytest.raises(ItemError, match=r"dataset\[7\], item 2 of group 1 in lane 1, does not fit: item\['image'\] is"):
        read("misfits")


def test_indices_know_what_the_batch_knows():
    again = list(LaneBatchSampler(2, 3, lengths=[9, 9], context=2))
    assert [batch.context for batch in (*again, *pickle.loads(pickle.dumps(again)))] == [2] * 2 * len(again)
    sampler = LaneBatchSampler(2, 3, lengths=[4, 2, 3], windows="packed", sections=3)
    whole = list(sampler)
    for batch in (*whole, *pickle.loads(pickle.dumps(whole)), *copy.deepcopy(whole)):
        for number, index in enumerate(batch):
            assert vars(pickle.loads(pickle.dumps(index))) == vars(index) == vars(batch[number])
    rows = [(int(i), i.source_index, i.position, i.is_first, i.is_last, i.batch_index, i.epoch) for i in whole[0]]
    assert rows == [
        (0, 0, 0, True, False, 0, 0),
        (3, 0, 3, True, True, 0, 0),
        (1, 0, 1, False, False, 0, 0),
        (4, 1, 0, True, False, 0, 0),
        (2, 0, 2, False, True, 0, 0),
        (5, 1, 1, False, True, 0, 0),
    ]
    assert np.asarray(whole[1]).tolist() == [6, 0, 7, 0, 8, 0]
    assert [index.source_index for index in whole[1]] == [2, -1, 2, -1, 2, -1]


def test_an_audit_of_the_sampler_needs_no_keys():
    samplers = [
        LaneBatchSampler(2, 3, lengths=[7, 4, 5, 9] * 3, shuffle=True, seed=1, rank=rank, world_size=2)
        for rank in range(2)
    ]
    found = audit(samplers, total=75)
    assert not found.wrong, found
    assert (found.delivered, found.ranks) == (75, 2)
    drawn = list(LaneBatchSampler(2, 3, lengths=[7, 4, 5, 9]))
    assert audit(drawn[::2], epochs=1).between.right == 2  # of three moves
