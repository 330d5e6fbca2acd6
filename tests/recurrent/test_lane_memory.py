"""A value a lane is that of the lane's stream alone, however batches are split, resumed and shared by ranks."""

from collections import deque

import numpy as np
import pytest
import torch
from carried import handed_over, resumed_before_each_batch, through_file
from helpers import random_cases
from hypothesis import given
from hypothesis import strategies as st

from stream_dataloader import StateError, StreamDataLoader, StreamDataset, merge_states
from stream_dataloader.recurrent import LaneMemory, RecurrentState
from stream_dataloader.recurrent.checkpoint import _sealed

LENGTHS = [7, 3, 5, 1, 4, 2, 6, 3, 5, 2]


def loader_of(workers=0, lanes=4, groups=None, **options):
    place = {key: options.pop(key) for key in ("rank", "world_size") if key in options}
    options = {"time_steps": 2, "shuffle": True, "seed": 5, "lengths": LENGTHS} | options
    dataset = StreamDataset(LENGTHS, range, lanes, **options)
    return StreamDataLoader(dataset, workers, virtual_ranks=groups, **place)


def remember(batch, memory):
    """Note each item in its lane's memory; before that, the memory has to hold the items of its stream before it."""
    cells = 0
    for t, seen in memory.steps(batch):
        for row, items in enumerate(seen):
            source, position = batch.source_index[t, row].item(), batch.position[t, row].item()
            where = f"batch {batch.batch_index}, t {t}, lane {batch.lane[row]}, source {source} at {position}"
            assert (items is None) == (source < 0), where
            if items is not None:
                assert list(items) == [(source, before) for before in range(position)], where
                items.append((source, position))
                cells += 1
    return cells


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from(["aligned", "packed"]),
    st.sampled_from(["whole", "parts", "micro-batches"]),
    st.integers(0, 6),
)
@random_cases(60)
def test_each_stream_sees_its_own_items(lengths, lanes, time_steps, windows, fed, saved_after):
    def loader():
        return StreamDataLoader(StreamDataset(lengths, range, lanes, time_steps=time_steps, windows=windows))

    memory, cells, state = LaneMemory(), 0, None
    batches = loader()
    for batch in batches.parts() if fed == "parts" else batches:
        pieces = batch.split_lanes(1) if fed == "micro-batches" else [batch]
        cells += sum(remember(piece, memory) for piece in pieces)
        if batch.batch_index == saved_after and fed != "parts":
            state = through_file([batch.state_dict(), memory.state_dict()])
    assert cells == sum(lengths)
    if state is not None:
        resumed, memory = loader(), LaneMemory()
        resumed.load_state_dict(state[0])
        memory.load_state_dict(state[1])
        assert sum(remember(batch, memory) for batch in resumed) <= cells


@pytest.mark.one_of_each
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("new", [list, lambda: deque(maxlen=99)], ids=["list", "deque"])
def test_any_batch_can_be_resumed_from(workers, new):
    whole = list(loader_of())
    found = resumed_before_each_batch(lambda _: (loader_of(workers), LaneMemory(new)), remember, len(whole))
    for (batch, memory, _), expected in zip(found, whole, strict=True):
        assert batch.batch_index == expected.batch_index
        assert type(memory[0]) is type(new())


@pytest.mark.parametrize(("before", "after"), [(1, 2), (4, 1), (2, 4)])
def test_any_number_of_ranks_takes_up_a_state(before, after):
    def make(**place):
        return loader_of(lanes=4 // place["world_size"], groups=4, **place), LaneMemory(**place)

    assert sum(map(sum, handed_over(make, remember, before, after))) == sum(LENGTHS)


@pytest.mark.parametrize("lanes", [2, 6])
def test_lanes_that_go_on_keep_their_values_with_another_batch_size(lanes):
    loader, memory = loader_of(lanes=4), LaneMemory()
    batches = iter(loader)
    cells = sum(remember(next(batches), memory) for _ in range(2))
    other, resumed = loader_of(lanes=lanes), LaneMemory()
    other.load_state_dict(loader.state_dict(), changes=["batch_size"])
    resumed.load_state_dict(memory.state_dict(), loader=other)
    found = 0
    for batch in other:  # of a stream that another lane takes up, what was seen before is not known
        for t, seen in resumed.steps(batch):
            for row, items in enumerate(seen):
                if items is not None:
                    source, position = batch.source_index[t, row].item(), batch.position[t, row].item()
                    assert items == [(source, p) for p in range(position - len(items), position)]
                    items.append((source, position))
                    found += 1
    assert cells + found == sum(LENGTHS)


def test_a_batch_that_is_not_the_next_one_is_refused():
    one, two, three, *_ = loader_of(shuffle=False)
    for first, then in (([one], three), ([one], one), ([], two)):
        memory = LaneMemory()
        for batch in first:
            remember(batch, memory)
        with pytest.raises(StateError, match=r"lane \d .*in batch \d of epoch 0"):
            list(memory.steps(then))
    memory, saved = LaneMemory(), LaneMemory()
    remember(one, saved)
    memory.load_state_dict(saved.state_dict())
    with pytest.raises(StateError, match="batch 2 of epoch 0"):
        list(memory.steps(three))


def test_a_loop_that_was_left_is_told_of_until_all_begins_anew():
    one, two, *_ = loader_of()
    memory = LaneMemory()
    for _t, seen in memory.steps(one):
        seen[0].append("half a batch")
        break
    for use in (lambda: list(memory.steps(one)), lambda: list(memory.steps(two)), memory.state_dict):
        with pytest.raises(StateError, match="left at t = 0 of batch 0 of epoch 0"):
            use()
    memory.reset()
    remember(one, memory)
    state = memory.state_dict()
    next(memory.steps(two))
    memory.load_state_dict(state)
    remember(two, memory)


def test_reset_forgets_lanes():
    one, two, *_ = loader_of(shuffle=False)
    memory = LaneMemory()
    remember(one, memory)
    memory.reset([1])
    with pytest.raises(KeyError, match=r"lane 1 has no value yet; the lanes with values are \[0, 2, 3\]"):
        memory[1]
    lengths = next([len(items) for items in seen] for _, seen in memory.steps(two))
    assert lengths == [0 if lane == 1 or two.reset[lane] else 2 for lane in range(4)]
    assert not two.reset[1]
    with pytest.raises(ValueError, match="lane -1"):
        memory.reset([-1])


class Bank:
    def __init__(self):
        self.frames = []

    def state_dict(self):
        return {"frames": self.frames}

    def load_state_dict(self, state):
        self.frames = state["frames"]


VALUES = {
    "nested": lambda: {"a": [1, 2.5, None, True], 3: ("x", b"y", {4, 5}), "z": 1j},
    "tensors": lambda: [torch.arange(3), torch.ones(2, 2, dtype=torch.bfloat16), torch.tensor(7)],
    "arrays": lambda: (np.arange(6).reshape(2, 3), np.zeros((0, 2), np.uint8), np.float32(1.5)),
    "deque": lambda: deque([torch.ones(1), 2], maxlen=3),
}


def equal(one, other):
    if isinstance(one, (torch.Tensor, np.ndarray)):
        return type(one) is type(other) and one.dtype == other.dtype and bool((one == other).all())
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, deque)):
        same = (
            type(one) is type(other)
            and len(one) == len(other)
            and getattr(one, "maxlen", 0) == getattr(other, "maxlen", 0)
        )
        return same and all(map(equal, one, other))
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_values_of_any_nesting_are_saved_by_value(value):
    (batch, *_), memory, other = loader_of(), LaneMemory(value), LaneMemory(value)
    list(memory.steps(batch))
    state = memory.state_dict()
    other.load_state_dict(through_file(state))
    assert equal(other[0], value())


def test_a_state_shares_nothing_with_what_saved_or_loaded_it():
    (batch, *_), memory, other = loader_of(), LaneMemory(lambda: [torch.ones(1)]), LaneMemory()
    list(memory.steps(batch))
    state = memory.state_dict()
    other.load_state_dict(state)
    for values in (memory[0], other[0]):
        values[0].zero_()
        values.append(1)
    assert state["values"][0] == [torch.ones(1)]


def test_a_value_may_be_replaced():
    """Other values than containers are put into the list: here the number of items so far."""
    memory = LaneMemory(int)
    for batch in loader_of(windows="packed"):
        for t, counts in memory.steps(batch):
            assert counts == [None if p < 0 else p for p in batch.position[t].tolist()]
            counts[:] = [None if count is None else count + 1 for count in counts]


def test_objects_save_their_own_state():
    (batch, *_), memory = loader_of(), LaneMemory(Bank)
    for _t, banks in memory.steps(batch):
        for bank in banks:
            if bank is not None:
                bank.frames.append(torch.ones(2))
    state = through_file(memory.state_dict())
    other = LaneMemory(Bank)
    other.load_state_dict(state)
    assert len(other[0].frames) == len(memory[0].frames) > 0
    with pytest.raises(StateError, match=r"new\(\) makes a list"):
        LaneMemory().load_state_dict(state)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([object()], r"value of lane 0\[0\] is a builtins.object, which cannot be saved"),
        ({"h": torch.ones(1, requires_grad=True)}, r"lane 0\['h'\] has a gradient.*detach"),
        ({(1, 2): 3}, "key of type tuple"),
        ([np.array(["text"])], r"lane 0\[0\] is an array of <U4"),
    ],
)
def test_what_cannot_be_saved_is_named(value, text):
    (batch, *_), memory = loader_of(), LaneMemory(lambda: value)
    list(memory.steps(batch))
    with pytest.raises(StateError, match=text):
        memory.state_dict()


def test_to_moves_tensors_at_any_depth():
    (batch, *_), memory = loader_of(), LaneMemory(lambda: {"a": [torch.ones(1)], "b": (deque([torch.ones(1)], 2), "x")})
    list(memory.steps(batch))
    assert memory.to("meta") is memory
    found = memory[0]
    assert found["a"][0].is_meta
    assert found["b"][0][0].is_meta
    assert (found["b"][0].maxlen, found["b"][1]) == (2, "x")


def test_states_of_other_kinds_are_refused():
    batch, memory, carry = next(iter(loader_of())), LaneMemory(), RecurrentState(batch_dim=0)
    list(memory.steps(batch))
    carry.after(batch, torch.zeros(4, 1))
    with pytest.raises(StateError, match="from a RecurrentState, but this is a LaneMemory"):
        memory.load_state_dict(carry.state_dict())
    with pytest.raises(StateError, match="from a LaneMemory, but this is a RecurrentState"):
        carry.load_state_dict(memory.state_dict())
    with pytest.raises(StateError, match="from a LaneMemory, but this is a RecurrentState"):
        merge_states([carry.state_dict(), memory.state_dict()])
    for states in ([loader_of().state_dict(), memory.state_dict()], [memory.state_dict(), loader_of().state_dict()]):
        with pytest.raises(StateError, match=r"state \d is a carried state of a model, and state \d is not"):
            merge_states(states)
    with pytest.raises(StateError, match="another number of values"):
        memory.load_state_dict(memory.state_dict() | {"values": []})
    with pytest.raises(StateError, match="cannot be read"):
        memory.load_state_dict(_sealed(memory.state_dict() | {"values": [("unknown", 1)] * 4}))
    with pytest.raises(TypeError, match="not a dict; leave collate_fn out"):
        list(memory.steps({}))
    with pytest.raises(TypeError, match="new must be a function"):
        LaneMemory(3)


def test_a_snapshot_shares_nothing():
    one, two, *_ = loader_of()
    memory = LaneMemory()
    remember(one, memory)
    before = memory._snapshot()
    remember(two, memory)
    remember(two, before)
    assert before[0] == memory[0]
    assert before[0] is not memory[0]
