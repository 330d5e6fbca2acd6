"""A saved state is input: whichever number in it is another one, loading it is an error, or nothing is lost."""

import contextlib
import copy
import itertools
import json

import numpy as np
import pytest
import torch
from helpers import random_cases
from hypothesis import given
from hypothesis import strategies as st
from kinds_of_loaders import KINDS

from stream_dataloader import StateError, StreamDataLoader, StreamDataset
from stream_dataloader._engine.schedule.state_check import SHARED, checksum

LENGTHS = [9, 0, 4, 7, 1, 3, 8, 2, 5, 6]
ALL = {(source, i) for source, length in enumerate(LENGTHS) for i in range(length)}
#: Numbers that are off by little, by much, or of another kind.
OTHERS = [-1, 0, 1, 2, 3, 7, 19, 2**31, 10**9, 10**15, 2**62, 2**63, 2**64, -(2**63), True, 1.5, None, "1"]


def opened(length):
    return iter(range(length))


def loader(**options):
    return StreamDataLoader(StreamDataset(LENGTHS, opened, 3, time_steps=2, seed=0, shuffle=True, **options))


def delivered(batches):
    """The items in batches, in order."""
    return [
        (source, position)
        for batch in batches
        for source, position in zip(
            batch.source_index[batch.mask].tolist(), batch.position[batch.mask].tolist(), strict=True
        )
    ]


def numbers_in(value, way=()):
    """The ways to all numbers in plain data."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers_in(inner, (*way, key))
    elif isinstance(value, (list, tuple)):
        for key, inner in enumerate(value):
            yield from numbers_in(inner, (*way, key))
    elif isinstance(value, (int, float)):
        yield way


def put(value, way, other):
    for key in way[:-1]:
        value = value[key]
    value[way[-1]] = other


def plain(state):
    return json.loads(json.dumps(state))


def sealed(state):
    """The state with checksums that fit, as whoever forges one would make them."""
    for name, group in state.items():
        if name.startswith("group_") and len(group) > 5:
            with contextlib.suppress(TypeError, OverflowError):  # some have none
                group[5] = checksum(state, group)
    return state


def after(steps, **options):
    """A state after some batches, and the items until then."""
    batches = iter(own := loader(**options))
    before = delivered(itertools.islice(batches, steps))
    return plain(own.state_dict()), before


@pytest.mark.parametrize("mode", ["zeros", "data", "drop"])
@random_cases(600, 15)
@given(data=st.data())
def test_a_number_that_is_another_one_is_an_error_or_changes_nothing(mode, data):
    state, _ = after(data.draw(st.integers(0, 7)), padding_mode=mode, lookahead=data.draw(st.integers(0, 2)))
    way = data.draw(st.sampled_from(list(numbers_in(state))))
    changed = copy.deepcopy(state)
    put(changed, way, data.draw(st.sampled_from(OTHERS)))
    own = loader(padding_mode=mode, lookahead=state["lookahead"])
    try:
        own.load_state_dict(changed)
    except StateError:
        return
    expected = loader(padding_mode=mode, lookahead=state["lookahead"])
    expected.load_state_dict(state)
    if changed["epoch"] == state["epoch"] and changed["seed"] == state["seed"]:
        assert delivered(own) == delivered(expected), way
    else:  # of an epoch that has not begun: it is read whole
        assert len(state["group_0"]) == 1, f"{way} was taken for what was saved"
        assert mode == "drop" or set(delivered(own)) == ALL


@pytest.mark.parametrize("kind", KINDS)
@random_cases(300, 12)
@given(data=st.data())
def test_numbers_that_are_forged_are_an_error_or_are_read_within_bounds(kind, data):
    own = KINDS[kind]()
    batches = iter(own)
    for _ in itertools.islice(batches, data.draw(st.integers(0, 3))):
        pass
    state = plain(own.state_dict())
    way = data.draw(st.sampled_from(list(numbers_in(state))))
    put(state, way, data.draw(st.sampled_from(OTHERS)))
    other = KINDS[kind]()
    try:
        other.load_state_dict(sealed(state))
    except StateError:
        return
    other.state_dict()


@pytest.mark.parametrize(
    ("place", "value", "text"),
    [
        (0, 10**9, "skipped sources, is 1000000000"),
        (1, 10**15, "sources handed out, is 1000000000000000, and must be a whole number from 0 to 10"),
        (2, [3, 3], "the same source in two places"),
        (2, [10**9], "holds source number 1000000000"),
        (3, [], "has 0 lanes, and must have 3"),
    ],
)
def test_a_forged_state_is_refused_with_what_is_wrong(place, value, text):
    state, _ = after(2, lookahead=0)
    state["group_0"][place] = value
    with pytest.raises(StateError, match=text):
        loader(lookahead=0).load_state_dict(sealed(state))
    if place == 1:
        state["group_0"][place] = after(2, lookahead=0)[0]["group_0"][1] + 1
        state["group_0"][5] -= 1
        with pytest.raises(StateError, match="damaged, or was put together from two states"):
            loader(lookahead=0).load_state_dict(state)


JOINED_OTHERS = {
    ("over", 0): True,
    ("step",): 1,
    ("epoch",): 1,
    ("members",): [],
    ("over",): (1, 2),
    ("version",): [1],
    ("side_by_side",): np.array([2, 2]),
    ("members", 1, "step"): 7,
    ("checksum",): None,
}


@pytest.mark.parametrize(("way", "other"), JOINED_OTHERS.items())
def test_whatever_is_changed_in_a_state_of_loaders_side_by_side_is_an_error(way, other):
    own = KINDS["side by side"]()
    for _ in itertools.islice(iter(own), 2):
        pass
    KINDS["side by side"]().load_state_dict(plain(own.state_dict()))
    put(state := plain(own.state_dict()), way, other)
    with pytest.raises(StateError, match=way[0] if way[0] != "side_by_side" else "number of members"):
        KINDS["side by side"]().load_state_dict(state)


def test_what_is_no_plain_data_is_an_error_of_the_state():
    for _ in itertools.islice(iter(own := KINDS["aligned"]()), 2):
        pass
    state = plain(own.state_dict())
    put(state, ("group_0", 4), np.ones((2, 2)))  # the layout of items, which only ranks without items need
    KINDS["aligned"]().load_state_dict(state)
    for other in (np.ones(2), torch.ones(2)):
        with pytest.raises(StateError, match="the state is not whole"):
            KINDS["aligned"]().load_state_dict(state | {"lookahead": other})


@pytest.mark.parametrize("count", range(6))
def test_a_group_is_whole(count):
    state, _ = after(2)
    assert len(state["group_0"]) == 6
    state["group_0"] = state["group_0"][:count]
    with pytest.raises(StateError, match=f"group_0 has {count} entries|not whole"):
        loader().load_state_dict(state)


@pytest.mark.parametrize("kind", KINDS)
def test_what_all_groups_share_is_under_their_checksums(kind):
    own = KINDS[kind]()
    next(iter(own))
    for state in own.state_dict().get("members", [own.state_dict()]):
        others = {name for name in state if not name.startswith("group_")} - {*SHARED}
        assert others <= {"mix", "epoch_place"}, "a name that the checksum leaves out may be changed unseen"


def test_a_state_may_come_from_a_file_that_knows_lists_alone_and_sorts_keys():
    state, before = after(2)
    resumed = loader()
    resumed.load_state_dict(json.loads(json.dumps(state, sort_keys=True)))
    assert sorted(before + delivered(resumed)) == sorted(ALL)


@pytest.mark.parametrize("name", [*SHARED, "group_0"])
def test_deep_nesting_in_a_state_is_an_error_of_the_state(name):
    state, _ = after(2)
    deep = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(StateError):
        loader().load_state_dict(state | {name: deep})


def test_groups_that_no_ranks_share_are_refused_at_once():
    state, _ = after(1)
    with pytest.raises(StateError, match="groups is 1000000000000000"):
        loader().load_state_dict(state | {"groups": 10**15})
