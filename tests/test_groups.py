"""Groups are scheduled like loaders of their own: what one reads depends on no other, nor on who hosts it."""

import json

import numpy as np
import pytest
from cases import Case, cells, check_fields
from hypothesis import given, settings
from hypothesis import strategies as st
from serial_model import serial_batches

from stream_dataloader import StateError, StreamDataLoader
from stream_dataloader.groups import Groups, dealt_by_length
from stream_dataloader.order import Order


@st.composite
def shared_cases(draw):
    """A case for lanes of one group, and how many groups there are."""
    groups = draw(st.integers(1, 8))
    mode = draw(st.sampled_from(["zeros", "data", "drop"]))
    lanes = draw(st.integers(1, 3))
    least = groups * lanes if mode == "drop" else groups
    lengths = draw(st.lists(st.integers(0, 8), min_size=least, max_size=least + 20))
    case = Case(
        lengths=lengths,
        lanes=lanes,
        time_steps=draw(st.integers(1, 4)),
        windows=draw(st.sampled_from(["aligned", "packed"])),
        padding_mode=mode,
        lookahead=draw(st.integers(0, 2)),
        shuffle=draw(st.booleans()),
        seed=draw(st.integers(0, 1 << 30)),
    )
    return case, groups, draw(st.booleans())


def dataset_of(case, groups, known):
    ours = Case(**{**vars(case), "lanes": case.lanes * groups.count})
    dataset = ours.dataset(lengths=case.lengths) if known else ours.dataset()
    dataset.host(groups)
    return dataset


def alone(case, dataset, group, total):
    """What the serial model says of one group, which has the sources that were dealt to it and no others."""
    order = Order(dataset.rules, 0, dataset.lengths)
    share = dataset.rules.groups.share(group, len(case.lengths))
    sources = [order[n * total + group].source for n in range(share)]
    batches = serial_batches(
        [case.lengths[source] for source in sources],
        lambda grant: grant % share,
        case.lanes,
        case.time_steps,
        case.windows,
        case.padding_mode,
        case.lookahead,
    )
    return [[[cell and (sources[cell[0]], *cell[1:]) for cell in lane] for lane in batch] for batch in batches], sources


@settings(max_examples=1500)
@given(shared_cases(), st.data())
def test_a_group_reads_what_it_would_alone_whoever_hosts_it(drawn, data):
    case, total, known = drawn
    world_size = data.draw(st.sampled_from([size for size in range(1, total + 1) if total % size == 0]))
    dealt = []
    for rank in range(world_size):
        groups = Groups.of_rank(total, rank, world_size)
        dataset = dataset_of(case, groups, known)
        batches = list(StreamDataLoader(dataset))
        expected = []
        for group in range(groups.first, groups.first + groups.count):
            lanes, sources = alone(case, dataset, group, total)
            expected.append(lanes)
            dealt += sources
        for batch in batches:
            check_fields(batch)
        found = [cells(batch) for batch in batches]
        ends = [len(lanes) for lanes in expected]
        assert len(found) == (min if case.padding_mode == "drop" else max)(ends)
        for hosted, lanes in enumerate(expected):
            rows = slice(hosted * case.lanes, (hosted + 1) * case.lanes)
            for step, batch in enumerate(found):
                if step < len(lanes):
                    assert batch[rows] == lanes[step]
                else:  # it pads, or reads again
                    assert not any(cell and cell[2] for lane in batch[rows] for cell in lane)
    assert sorted(dealt) == list(range(len(case.lengths)))  # each source is of one group


@settings(max_examples=25)
@given(shared_cases(), st.integers(1, 3))
@pytest.mark.filterwarnings("ignore:num_workers is")
def test_workers_make_no_difference_to_groups(drawn, workers):
    case, total, known = drawn
    groups = Groups(total, 0, total)
    expected = [cells(batch) for batch in StreamDataLoader(dataset_of(case, groups, known))]
    assert [cells(batch) for batch in StreamDataLoader(dataset_of(case, groups, known), workers)] == expected


@settings(max_examples=300)
@given(shared_cases(), st.data())
def test_groups_resume(drawn, data):
    case, total, known = drawn
    groups = Groups(total, 0, total)
    whole = [cells(batch) for batch in StreamDataLoader(dataset_of(case, groups, known))]
    step = data.draw(st.integers(0, len(whole)))
    loader = StreamDataLoader(dataset_of(case, groups, known))
    for _ in zip(range(step), loader, strict=False):
        pass
    state = json.loads(json.dumps(loader.state_dict(step if step else None)))
    resumed = StreamDataLoader(dataset_of(case, groups, known))
    resumed.load_state_dict(state)
    assert [cells(batch) for batch in resumed] == whole[step:]


@settings(max_examples=300)
@given(shared_cases())
def test_the_number_of_steps_is_that_of_the_longest_group_on_every_rank(drawn):
    case, total, _ = drawn
    counts = {
        StreamDataLoader(dataset_of(case, Groups.of_rank(total, rank, total), known=True)).__len__()
        for rank in range(total)
    }
    whole = dataset_of(case, Groups(total, 0, total), known=True)
    assert counts == {len(list(StreamDataLoader(whole)))}


@given(st.lists(st.integers(0, 100), min_size=1, max_size=60), st.integers(1, 8))
def test_dealing_by_length_keeps_blocks_and_evens_loads(lengths, groups):
    lengths = np.array(lengths)
    order = np.argsort(-lengths, kind="stable")
    dealt = dealt_by_length(order, lengths, groups)
    for begin in range(0, len(order), groups):
        assert sorted(dealt[begin : begin + groups]) == sorted(order[begin : begin + groups])
    loads = [lengths[dealt[group::groups]].sum() for group in range(groups)]
    assert max(loads) - min(loads) <= lengths.max()  # no group is further ahead than by one source


def test_what_groups_cannot_share_is_refused():
    with pytest.raises(ValueError, match=r"groups is 8, which 3 ranks cannot share evenly; .* by 1, 2, 4, 8 ranks"):
        Groups.of_rank(8, 0, 3)
    with pytest.raises(ValueError, match="rank is 4, and there are 4 ranks"):
        Groups.of_rank(8, 4, 4)
    with pytest.raises(ValueError, match="batch_size is 3, and 2 groups"):
        Case([1] * 9, lanes=3).dataset().host(Groups(4, 0, 2))
    with pytest.raises(ValueError, match="3 sources for 4 groups"):
        Case([1] * 3, lanes=4).dataset().host(Groups(4, 0, 4))
    with pytest.raises(ValueError, match="7 sources leave some of 8 lanes idle"):
        Case([1] * 7, lanes=4, padding_mode="drop").dataset().host(Groups(4, 0, 2))


def test_a_state_belongs_to_its_groups():
    one, other = (Case([4] * 8).dataset() for _ in range(2))
    one.host(Groups.of_rank(2, 0, 2))
    other.host(Groups.of_rank(2, 1, 2))
    state = StreamDataLoader(one).state_dict()
    with pytest.raises(StateError, match="of 2 groups, from number 0 on, and the loader has 2, from number 1 on"):
        StreamDataLoader(other).load_state_dict(state)
    assert next(iter(StreamDataLoader(other))).source[0].tolist() == [1, 3]
