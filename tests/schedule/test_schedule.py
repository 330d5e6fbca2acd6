"""The pure functions: order, assignment, number of steps."""

import numpy as np
import pytest
import torch
from cases import cases
from helpers import random_cases
from hypothesis import given
from hypothesis import strategies as st

from stream_dataloader import StreamDataLoader, StreamDataset, split_batch_size
from stream_dataloader._engine.schedule.order import Order
from stream_dataloader._engine.schedule.place import Place
from stream_dataloader._engine.schedule.rules import deal_lanes


@given(st.integers(1, 50), st.integers(0, 60))
def test_lanes_are_split_evenly_and_in_order(batch_size, num_workers):
    sizes = split_batch_size(batch_size, num_workers)
    assert sum(sizes) == batch_size
    assert len(sizes) == max(1, min(batch_size, num_workers))
    assert sizes[0] - sizes[-1] <= 1
    assert sizes == sorted(sizes, reverse=True)

    readers = deal_lanes(batch_size, num_workers)
    assert [lane for reader in readers for lane in reader.lanes] == list(range(batch_size))
    assert [len(reader.lanes) for reader in readers] == list(sizes)
    assert [reader.worker_id for reader in readers] == list(range(len(sizes)))


@random_cases(700)
@given(cases(), st.sampled_from([None, "longest_first", "balanced"]))
def test_known_lengths_make_len_exact(case, schedule):
    case.shuffle |= schedule == "balanced"
    loader = StreamDataLoader(case.dataset(lengths=case.lengths, schedule=schedule))
    for epoch in range(2):
        assert len(loader) == len(list(loader)) == len(list(case.expected(loader.dataset, epoch)))


@pytest.mark.parametrize("options", [{}, {"padding_mode": "cycle"}, {"lengths": [1], "padding_mode": "cycle"}])
def test_len_is_a_type_error_where_it_is_not_known(options):
    loader = StreamDataLoader(StreamDataset([1], range, 1, time_steps=1, **options))
    with pytest.raises(TypeError, match="batches_per_epoch=" if "padding_mode" in options else "lengths="):
        len(loader)
    assert loader
    assert len(list(zip(loader, range(1), strict=False))) == 1  # list() and zip() do not trip over it


def permutation(epoch, **options):
    options = {"shuffle": True, "seed": 3} | options
    dataset = StreamDataset(range(50), range, 4, time_steps=1, **options)
    order = Order(dataset._rules, Place(epoch), dataset.lengths)
    return [order[i].source for i in range(50)]


def test_shuffle_is_a_new_permutation_each_epoch_and_the_same_in_every_run():
    assert sorted(permutation(0)) == list(range(50))
    assert permutation(0) == permutation(0)
    assert permutation(0) != permutation(1)
    assert permutation(0) != permutation(0, seed=4)
    assert permutation(0, shuffle=False) == list(range(50))


def test_longest_first_sorts_by_length_and_shuffles_equals():
    lengths = [i % 5 for i in range(50)]
    sources = permutation(0, schedule="longest_first", lengths=lengths)
    assert [lengths[s] for s in sources] == sorted(lengths, reverse=True)
    assert sources != permutation(1, schedule="longest_first", lengths=lengths)


def test_balanced_draws_sources_in_proportion_to_their_length():
    lengths = [30, 10] + [0] * 48
    first = [permutation(epoch, schedule="balanced", lengths=lengths, shuffle=True)[0] for epoch in range(800)]
    assert set(first) == {0, 1}
    assert 0.67 < first.count(0) / 800 < 0.83  # 3 : 1; five standard deviations


def test_balanced_without_shuffle_is_an_error():
    with pytest.raises(ValueError, match=r'schedule="balanced" is a random order, and shuffle is False; pass shuffle='):
        permutation(0, schedule="balanced", lengths=range(50), shuffle=False)


def test_the_order_of_the_list_is_no_schedule():
    assert StreamDataset([3], range, 1, time_steps=1)._rules.schedule is None
    with pytest.raises(ValueError, match="schedule is 'listed', and must be one of 'longest_first', 'balanced', None"):
        permutation(0, schedule="listed")


@pytest.mark.parametrize("schedule", ["longest_first", "balanced"])
def test_schedules_by_length_waste_less(schedule):
    lengths = np.random.default_rng(1).integers(1, 200, 60).tolist()

    def batches(schedule):
        options = {"lengths": lengths, "schedule": schedule, "seed": 0, "shuffle": schedule == "balanced"}
        return len(StreamDataLoader(StreamDataset(lengths, range, 8, time_steps=1, **options)))

    assert sum(lengths) / 8 <= batches(schedule) < 0.9 * batches(None)


def test_seed_none_follows_torchs_generator():
    torch.manual_seed(5)
    first, other = permutation(0, seed=None), permutation(0, seed=None)
    torch.manual_seed(5)
    assert permutation(0, seed=None) == first != other
