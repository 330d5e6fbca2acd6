"""Groups are scheduled like loaders of their own: what one reads depends on no other, nor on who hosts it."""

import contextlib
import dataclasses
import itertools
import json
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from cases import Case, cells, check_fields, keys
from helpers import make_loader, random_cases
from hypothesis import assume, given
from hypothesis import strategies as st
from rank_processes import EXAMPLES, loader_of, shared_cases, world_sizes
from worker_streams import acting, raising

from stream_dataloader import LaneBatchSampler, StreamDataLoader, StreamDataset, errors, merge_states
from stream_dataloader._engine.schedule.order import Order, dealt_by_length
from stream_dataloader._engine.schedule.place import Place
from stream_dataloader._engine.schedule.rules import Groups


def alone(case, known, group, total):
    """What the serial model says of one group, which has the sources that were dealt to it and no others."""
    dataset = case.dataset(lengths=case.lengths) if known else case.dataset()
    groups = Groups(total, group, 1)
    order = Order(dataclasses.replace(dataset._rules, groups=groups), Place(0), dataset.lengths)
    share = groups.share(group, len(case.lengths))
    sources = [order[n * total + group].source for n in range(share)]
    return list(case.expected(dataset, drawn=sources)), sources


@random_cases(EXAMPLES)
@given(shared_cases(), st.data())
@pytest.mark.filterwarnings("ignore:ranks cannot agree")
def test_a_group_reads_what_it_would_alone_whoever_hosts_it(drawn, data):
    case, total, known = drawn
    world_size = data.draw(world_sizes(total))
    expected, dealt = [], []
    for group in range(total):
        lanes, sources = alone(case, known, group, total)
        expected.append(lanes)
        dealt += sources
    assert sorted(dealt) == list(range(len(case.lengths)))  # each source is of one group
    ends = [len(lanes) for lanes in expected]
    count = total // world_size
    for rank in range(world_size):
        local = range(rank * count, (rank + 1) * count)
        loader = loader_of(*drawn, world_size=world_size, rank=rank) if world_size > 1 else loader_of(*drawn)
        if known and case.padding_mode != "drop" and max(ends) and not max(ends[group] for group in local):
            with pytest.raises(errors.RankError, match="this rank has no items left"):
                next(iter(loader))
            continue
        batches = list(loader)
        for batch in batches:
            check_fields(batch)
        together = ends if known else [ends[group] for group in local]
        assert len(batches) == (min if case.padding_mode == "drop" else max)(together)
        loader.set_epoch(0)
        assert not known or len(loader) == len(batches)
        for i, group in enumerate(local):
            rows = slice(i * case.lanes, (i + 1) * case.lanes)
            for step, batch in enumerate(map(cells, batches)):
                if step < ends[group]:
                    assert batch[rows] == expected[group][step]
                else:  # it pads, or reads again
                    assert not any(cell and cell[2] for lane in batch[rows] for cell in lane)


@random_cases(EXAMPLES)
@given(shared_cases(), st.data())
@pytest.mark.filterwarnings("ignore:ranks cannot agree")
def test_groups_resume_on_any_number_of_ranks(drawn, data):
    case, total, known = drawn
    before, after = data.draw(world_sizes(total)), data.draw(world_sizes(total))
    whole = keys(loader_of(*drawn))
    step = data.draw(st.integers(0, len(whole)))

    def head(rank):
        loader = loader_of(*drawn, world_size=before, rank=rank)
        read = 0
        with contextlib.suppress(errors.RankError):  # without another rank to tell what items are like
            read = sum(1 for _ in zip(range(step), loader, strict=False))
        return loader.state_dict(), read

    states, read = zip(*map(head, range(before)), strict=True)
    assume(set(read) == {step})  # without lengths, and nobody to ask, a rank may end early
    state = json.loads(json.dumps(merge_states(states)))
    tails = []
    for rank in range(after):
        loader = loader_of(*drawn, world_size=after, rank=rank)
        loader.load_state_dict(state)
        try:
            tails.append(keys(loader))
        except errors.RankError:  # it has no item to read, from there on
            tails.append(None)
    expected_tail = whole[step:]
    if known and step and step == len(whole):  # the end is known, so the state is the next epoch's beginning
        loader = loader_of(*drawn)
        loader.set_epoch(1)
        expected_tail = keys(loader)
    longest = max(len(tail or []) for tail in tails)
    assert longest == len(expected_tail) or case.padding_mode == "drop"
    for rank, tail in enumerate(tails):
        lanes = case.lanes * total // after
        rows = slice(rank * lanes, (rank + 1) * lanes)
        expected = [[[cells_of[rows] for cells_of in field] for field in batch[2:6]] for batch in expected_tail]
        if tail is None:
            assert not any(real(source) for *_, source, _ in expected), f"rank {rank} has items to read"
            continue
        assert not any(any(map(any, mask)) for _, mask, *_ in expected[len(tail) :]), f"rank {rank} ends too early"
        for batch, of_rank in zip(tail, expected, strict=False):
            assert batch[2:6] == of_rank


def real(source):
    return any(index >= 0 for of_step in source for index in of_step)


class Pair(NamedTuple):
    image: Any
    label: Any


def pairs(length):
    return ({"b": Pair(torch.full((2, 3), i, dtype=torch.bfloat16), i), "a": f"{i}"} for i in range(length))


def test_a_rank_that_has_ended_pads_windows_as_long_as_its_streams_gave():
    dataset = StreamDataset([3, 1], lambda n: torch.zeros(n, 4, 2), 1, windows="given", lengths=[3, 1])
    for rank in range(2):
        shapes = [tuple(batch.data.shape) for batch in StreamDataLoader(dataset, rank=rank, world_size=2)]
        assert shapes == [(4, 1, 2)] * 3, f"rank {rank}"


@pytest.mark.parametrize("options", [{}, {"collate_fn": list}], ids=["batches", "collate_fn"])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_resumed_rank_with_nothing_left_knows_what_items_look_like(options, steps):
    def loader(rank):
        dataset = StreamDataset([9, 1], pairs, 1, seed=0, lengths=[9, 1], time_steps=2)
        return StreamDataLoader(dataset, **options, virtual_ranks=2, rank=rank, world_size=2)

    def head(rank):
        own = loader(rank)
        assert len(list(itertools.islice(own, steps))) == steps
        return own.state_dict()

    whole, resumed = list(loader(1)), loader(1)
    resumed.load_state_dict(json.loads(json.dumps(merge_states([head(0), head(1)]))))
    rest = list(resumed)
    assert [repr(getattr(batch, "data", batch)) for batch in rest] == [
        repr(getattr(batch, "data", batch)) for batch in whole[steps:]
    ]
    assert len(rest) == 5 - steps
    assert options or not any(batch.mask.any() for batch in rest)


@pytest.mark.parametrize("item", [dataclasses.make_dataclass("Local", ["x"])(1), {(1, 2): 3}], ids=str)
def test_items_that_cannot_be_written_down_hinder_no_state(item):
    loader = make_loader([3, 3], lambda n: [item] * n, 2, lengths=[3, 3], time_steps=1, seed=0, virtual_ranks=2)
    loader.load_state_dict(json.loads(json.dumps(next(iter(loader)).state_dict())))


@given(st.lists(st.integers(0, 100), min_size=1, max_size=60), st.integers(1, 8))
def test_dealing_by_length_keeps_blocks_and_evens_loads(lengths, groups):
    lengths = np.array(lengths)
    order = np.argsort(-lengths, kind="stable")
    dealt = dealt_by_length(order, lengths, groups)
    for begin in range(0, len(order), groups):
        assert sorted(dealt[begin : begin + groups]) == sorted(order[begin : begin + groups])
    loads = [lengths[dealt[group::groups]].sum() for group in range(groups)]
    assert max(loads) - min(loads) <= lengths.max()  # no group is further ahead than by one source


@pytest.mark.parametrize(
    ("lengths", "lanes", "options", "text"),
    [
        ([1] * 9, 4, {"virtual_ranks": 8, "rank": 0, "world_size": 3}, "8, which 3 ranks .* by 1, 2, 4, 8 ranks"),
        ([1] * 9, 4, {"rank": 4, "world_size": 4}, "rank is 4"),
        ([1] * 9, 4, {"rank": 1}, "both"),
        ([1] * 9, 4, {"virtual_ranks": 0}, "virtual_ranks is 0"),
        ([1] * 9, 3, {"virtual_ranks": 4, "rank": 0, "world_size": 2}, "batch_size is 3, and 2 virtual ranks"),
        ([1] * 3, 4, {"virtual_ranks": 4}, "3 sources for 4 virtual ranks"),
        ([1] * 7, 4, {"virtual_ranks": 4, "rank": 0, "world_size": 2, "mode": "drop"}, "7 sources .* 8 lanes"),
        ([1] * 7, 4, {"process_group": object()}, r"torch\.distributed"),
    ],
)
def test_what_groups_cannot_share_is_refused(lengths, lanes, options, text):
    mode = options.pop("mode", "zeros")
    with pytest.raises(ValueError, match=text):
        StreamDataLoader(Case(lengths, lanes=lanes, padding_mode=mode).dataset(), **options)


def loaders(world_size, lanes=1, **options):
    return [
        StreamDataLoader(Case([4] * 8, lanes).dataset(**options), rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]


@pytest.mark.filterwarnings("ignore:ranks cannot agree")
def test_a_state_is_for_the_rank_that_saved_it():
    first, second = loaders(2)
    with pytest.raises(errors.StateError, match="merge_states"):
        second.load_state_dict(first.state_dict())
    assert next(iter(second)).source_index[0].tolist() == [1]


@pytest.mark.filterwarnings("ignore:ranks cannot agree")
def test_a_whole_state_says_for_how_many_ranks_it_is():
    whole, dataset = merge_states([loader.state_dict() for loader in loaders(4)]), Case([4] * 8, 2).dataset()
    with pytest.raises(errors.StateError, match=r"4, which 3 ranks .* by 1, 2, 4 ranks"):
        StreamDataLoader(dataset, rank=0, world_size=3).load_state_dict(whole)
    with pytest.raises(errors.StateError, match="batch_size"):
        StreamDataLoader(Case([4] * 8, 2).dataset(), virtual_ranks=2).load_state_dict(whole | {"groups": 4})
    resumed = StreamDataLoader(dataset, rank=1, world_size=2)
    resumed.load_state_dict(whole)
    assert next(iter(resumed)).source_index[0].tolist() == [2, 3]


@pytest.mark.filterwarnings("ignore:ranks cannot agree")
def test_states_of_different_moments_are_not_merged():
    first, second = loaders(2)
    next(iter(first))
    for states in ([first.state_dict(), second.state_dict()], [first.state_dict()], [], [{}]):
        with pytest.raises(errors.StateError):
            merge_states(states)


@pytest.mark.filterwarnings("ignore:.*gone", "ignore:ranks cannot agree")
def test_skipped_streams_are_counted_by_group():
    gone = acting({(n, 0): raising(OSError, "gone") for n in (1, 3, 9)}, 4)

    def loader(rank, world_size, **options):
        dataset = StreamDataset(range(12), gone, 2 // world_size, seed=0, time_steps=2, on_error="skip", **options)
        return StreamDataLoader(dataset, virtual_ranks=2, rank=rank, world_size=world_size)

    ranks = [loader(rank, 2) for rank in range(2)]
    for one in ranks:
        list(itertools.islice(one, 2))
    alone = loader(0, 1, max_failures=2)
    alone.load_state_dict(merge_states([one.state_dict() for one in ranks]))
    with pytest.raises(errors.FailureLimitError, match="3 sources"):
        list(alone)
    alone, second = loader(0, 1), loader(1, 2, max_failures=2)
    list(itertools.islice(alone, 2))
    second.load_state_dict(alone.state_dict())
    with pytest.raises(errors.FailureLimitError, match="3 sources"):
        list(second)


def test_lengths_that_decide_who_reads_what_are_part_of_a_state():
    def loader(lengths, groups=2, **options):
        return make_loader([4] * 6, range, 2, time_steps=2, seed=0, lengths=lengths, **options, virtual_ranks=groups)

    for saved, here in [(None, [4] * 6), ([4] * 6, None), ([4] * 6, [4] * 5 + [3])]:
        state = loader(saved).state_dict()
        loader(saved).load_state_dict(state)
        with pytest.raises(errors.StateError):
            loader(here).load_state_dict(state)
        loader(here, groups=1).load_state_dict(loader(saved, groups=1).state_dict())


def test_a_state_that_is_loaded_before_the_rank_is_known_is_kept(monkeypatch):
    """torch.distributed may be started after the state is loaded: what counts is the rank that then begins."""
    from stream_dataloader._engine.ranks import own_rank

    def loader():
        return StreamDataLoader(Case([6] * 8, lanes=2, time_steps=1).dataset(), virtual_ranks=2)

    whole, later = loader(), loader()
    list(itertools.islice(whole, 3))
    later.load_state_dict(whole.state_dict())
    monkeypatch.setattr(own_rank, "find_rank", lambda *_: own_rank.RankInfo(1, 2))
    with pytest.raises(errors.StateError, match="batch_size"):  # two groups had two lanes, one has one
        next(iter(later))


def test_a_rank_is_looked_up_for_each_epoch(monkeypatch):
    """torch.distributed may be started anew, with this process as another rank."""
    from stream_dataloader._engine.ranks import own_rank

    options = {"lengths": [6, 4, 5, 3, 7, 2], "shuffle": True, "seed": 0}
    places, expected = [own_rank.RankInfo(rank, 2) for rank in (1, 0, 1)], []
    for epoch, own in enumerate(places):
        expected.append(LaneBatchSampler(1, 2, **options, rank=own.rank, world_size=own.world_size))
        expected[epoch].set_epoch(epoch)
    expected = [list(map(list, one)) for one in expected]
    sampler = LaneBatchSampler(1, 2, **options)
    monkeypatch.setattr(own_rank, "is_started", lambda: True)
    for epoch, own in enumerate(places):
        monkeypatch.setattr(own_rank, "find_rank", lambda *_, own=own: own)
        assert list(map(list, sampler)) == expected[epoch], epoch


def test_a_state_brings_its_seed_to_all_groups():
    def loader():
        return StreamDataLoader(Case([4] * 9, 2, shuffle=True, seed=None).dataset(), virtual_ranks=2)

    torch.manual_seed(0)
    one, other = loader(), loader()
    batches = iter(one)
    next(batches)
    other.load_state_dict(one.state_dict())
    assert keys(other) == keys(batches)
    assert keys(other) == keys(one), "the next epoch"


@pytest.mark.filterwarnings("ignore:ranks cannot agree")
def test_a_rank_whose_share_of_some_passes_is_empty_goes_on_with_the_next():
    for rank in range(2):
        case = Case([0, 0, 0, 0, 0, 3], lanes=1, time_steps=1, padding_mode="cycle", shuffle=True)
        loader = StreamDataLoader(case.dataset(), rank=rank, world_size=2)
        batches = list(itertools.islice(loader, 60))
        assert {int(batch.source_index[0, 0]) for batch in batches} == {5}
        assert [int(batch.position[0, 0]) for batch in batches] == [0, 1, 2] * 20
    for options in ({"shuffle": True}, {}):
        case = Case([0] * 5 if options else [0, 3] * 3, lanes=1, time_steps=1, padding_mode="cycle", **options)
        with pytest.raises(errors.EmptySourcesError):
            next(iter(StreamDataLoader(case.dataset(), rank=0, world_size=2)))
