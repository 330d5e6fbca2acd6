"""What a state says at an epoch's end, and as of a step."""

import itertools

import pytest
from cases import cases, key, keys
from helpers import random_cases
from hypothesis import given
from hypothesis import strategies as st

from stream_dataloader import Sections, StreamDataLoader, StreamDataset, interleave
from stream_dataloader._engine.schedule.order import Order

LENGTHS = [5, 3, 6, 2, 4]


def loader_of(workers=0, **options):
    return StreamDataLoader(StreamDataset(LENGTHS, range, 2, time_steps=2, shuffle=True, seed=0, **options), workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_step_means_that_step_also_when_the_end_was_seen(workers):
    loader, other = loader_of(workers), loader_of()
    fetched = list(loader)  # a trainer fetched them all, and has used some
    last = len(fetched)
    for used in range(1, last):
        state = loader.state_dict(used)
        assert (state["epoch"], state["step"]) == (0, used)
        assert state == fetched[used - 1].state_dict() == fetched[used - 1].to("cpu").state_dict()
        other.load_state_dict(state)
        assert keys(other) == [key(batch) for batch in fetched[used:]]
    assert loader.state_dict(last) == loader.state_dict()
    assert loader.state_dict()["epoch"] == 1
    for unknown in (last + 1, 99, -1):
        with pytest.raises(ValueError, match=f"after {unknown} batches is not kept, only those after 0 to {last}"):
            loader.state_dict(unknown)
    with pytest.raises(ValueError, match="straight from a StreamDataLoader"):
        next(iter(loader.parts())).state_dict()


def test_a_step_that_was_not_read_is_not_known():
    def is_unknown(step, text):
        with pytest.raises(ValueError, match=text):
            loader.state_dict(step)

    loader = loader_of()
    assert loader.state_dict(0) == loader.state_dict()
    is_unknown(5, "after 5 batches is not known: epoch 0 has not begun; it begins with batch 0")
    list(itertools.islice(loader, 2))
    state = loader.state_dict(1)
    loader.load_state_dict(state)
    assert loader.state_dict(1) == state
    is_unknown(2, "begins with batch 1")
    loader.set_epoch(3)
    is_unknown(1, "epoch 3 has not begun")


@random_cases(60)
@given(cases(max_streams=8, max_length=6, max_lanes=4), st.booleans())
def test_behind_the_last_of_n_known_batches_the_state_is_the_next_epochs_beginning(case, groups):
    dataset = case.dataset(lengths=case.lengths)
    groups = case.lanes if groups and len(case.lengths) >= case.lanes else None
    loader = StreamDataLoader(dataset, virtual_ranks=groups)
    batches, count = iter(loader), len(loader)
    for step in range(count):
        batch = next(batches)
        expected = (1, 0) if step == count - 1 else (0, step + 1)
        for state in (loader.state_dict(), loader.state_dict(step + 1), batch.state_dict()):
            assert (state["epoch"], state["step"]) == expected
    state = loader.state_dict()
    assert next(batches, None) is None
    assert loader.state_dict() == (state if count else loader.state_dict())


@random_cases(60)
@given(cases(max_streams=8, max_length=6, max_lanes=4))
def test_a_state_that_did_not_know_the_end_is_of_the_next_epoch_where_lengths_are_known(case):
    loader, knows = StreamDataLoader(case.dataset()), StreamDataLoader(case.dataset(lengths=case.lengths))
    total, batches = len(knows), iter(loader)  # taken before a state is loaded: the next epoch may have more or fewer
    for count, _ in zip(range(1, total + 1), batches, strict=False):
        knows.load_state_dict(loader.state_dict())
        assert knows.epoch == (count == total), f"after {count} of {total} batches"
    rest = keys(batches)
    assert not rest
    assert not total or keys(knows) == keys(loader)


@pytest.mark.parametrize("options", [{}, {"deterministic": False}])
def test_so_it_is_with_workers_and_the_next_epoch_is_whole(options):
    def loader(workers=0):
        return loader_of(workers, lengths=LENGTHS, **options)

    first, other, whole = loader(2), loader(), loader()
    seen = [next(batches := iter(first))]
    while first.state_dict()["epoch"] == 0:
        seen.append(next(batches))
    other.load_state_dict(first.state_dict())
    whole.set_epoch(1)
    read = list(other)
    for batches in (seen, read):
        assert sum(int(batch.mask.sum()) for batch in batches) == sum(LENGTHS)
    assert options or keys(read) == keys(whole)


def of(lengths, cut=None, **options):
    return StreamDataset(lengths, range, 1, time_steps=2, lookahead=0, seed=0, lengths=lengths, sections=cut, **options)


@pytest.mark.parametrize(
    "dataset",
    [
        of([6, 4, 0, 0, 0]),
        of([6, 4, 0, 0, 0], schedule="longest_first"),
        of([3, 3], Sections(2, jitter=True)),
        interleave([of([6, 4, 2]), of([0])], weights=[1, 9], exhausted="repeat"),
    ],
)
def test_what_is_left_may_be_nothing_but_empty_streams(dataset):
    loader, left = StreamDataLoader(dataset), int(dataset.lengths.sum())
    for batch in loader:
        left -= int(batch.mask.sum())
        epoch = loader.state_dict()["epoch"]
        assert epoch == (left == 0), f"epoch {epoch} behind batch {batch.batch_index}, with {left} items left"


def test_long_before_the_end_a_state_needs_no_order(monkeypatch):
    asked, draw = [], Order.__getitem__
    monkeypatch.setattr(Order, "__getitem__", lambda order, number: asked.append(number) or draw(order, number))
    loader = StreamDataLoader(of([4] * 100, shuffle=True), 1)  # the worker's are noted in the worker
    batches = iter(loader)
    next(batches).state_dict()
    assert not asked
