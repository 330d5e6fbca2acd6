"""torch's own `DataLoader` over a `StreamDataset`: parts tagged with their worker id."""

import re
import traceback
import warnings

import pytest
import torch
from cases import Case, cases, key
from helpers import START_METHODS, random_cases
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from worker_streams import acting, kill_self, raising

from stream_dataloader import ItemError, ReadError, StreamDataLoader, StreamDataset, sections

CASE = Case([4, 0, 9, 2, 2, 7, 1, 3, 5, 8, 6], lanes=4, time_steps=3, shuffle=True, seed=1)


def plain(dataset, workers, **options):
    return DataLoader(dataset, batch_size=None, num_workers=workers, **options)


def check_raises(kind, match, parts):
    """Reading all parts raises; afterwards torch's iterator, which the traceback keeps, is let go."""
    with pytest.raises(kind, match=match) as caught:
        list(parts)
    traceback.clear_frames(caught.tb)


def check_parts(parts, batches):
    """Parts are what the batches hold, each worker's in order of step."""
    seen, count = {}, 0
    for part in parts:
        worker = int(part.worker_id[0])
        assert part.step == seen.get(worker, -1) + 1
        seen[worker] = part.step
        whole = batches[part.step]
        marks = ["is_last"] if whole.is_last is not None else []
        for name in ("data", "mask", "source", "position", "is_start", *marks):
            assert torch.equal(getattr(part, name), getattr(whole, name)[:, part.lane])
        count += int(part.mask.sum())
    assert count == sum(int(batch.mask.sum()) for batch in batches)


@random_cases(60)
@given(cases(max_streams=12, max_length=8, max_lanes=5), st.integers(0, 4), st.integers(1, 3))
def test_parts_are_those_of_the_batches(case, workers, prefetch_factor):
    batches = list(StreamDataLoader(case.dataset()))
    options = {"prefetch_factor": prefetch_factor} if workers else {}
    check_parts(plain(case.dataset(), workers, **options), batches)


@pytest.mark.parametrize(("padding_mode", "persistent"), [("zeros", False), ("data", True), ("drop", True)])
@pytest.mark.parametrize("method", START_METHODS)
def test_epochs_count_on_early_breaks_included(padding_mode, persistent, method):
    case = Case(CASE.lengths, 4, 3, padding_mode=padding_mode, shuffle=True, seed=1, jitter=True)
    loader = StreamDataLoader(case.dataset())
    epochs = [list(loader) for _ in range(4)]
    parts = plain(case.dataset(), 2, persistent_workers=persistent, multiprocessing_context=method)
    for epoch, batches in enumerate(epochs):
        if epoch == 1:
            for part, _ in zip(parts, range(3), strict=False):
                assert part.epoch == epoch
        else:
            check_parts(parts, batches)


@pytest.mark.slow
def test_many_short_iterations_reuse_the_shared_memory():
    dataset = CASE.dataset()
    for epoch in range(80):  # more than there are places for sessions
        assert next(iter(plain(dataset, 2))).epoch == epoch


def test_several_loaders_over_one_dataset_at_once():
    dataset, loaders = StreamDataset(range(5, 15), range, 3, time_steps=2), []
    for workers in (3, 2):
        torch.manual_seed(0)  # the same base seed for other workers
        loaders.append(iter(plain(dataset, workers)))
    assert sum(int(part.mask.sum()) for parts in loaders for part in parts) == 2 * sum(range(5, 15))


def test_set_epoch_of_the_dataset_works_across_processes():
    dataset = CASE.dataset()
    parts = plain(dataset, 2, persistent_workers=True)
    first, _ = ([key(part, worker_id=True) for part in parts] for _ in range(2))
    dataset.set_epoch(0)
    assert [key(part, worker_id=True) for part in parts] == first


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_stream_is_an_error_that_names_it(workers):
    broken = acting({(0, 1): raising(OSError)})
    check_raises(ReadError, r"source 0 .*item 1", plain(StreamDataset([0, 1], broken, 2, time_steps=2), workers))


@pytest.mark.parametrize("workers", [1, 2])
def test_an_item_that_cannot_be_sent_is_an_error_and_not_a_hang(workers):
    dataset = StreamDataset([0, 1], lambda _: iter([(i for i in ())]), 2, time_steps=1)
    check_raises(ItemError, "pickled", plain(dataset, workers))


def test_a_killed_worker_ends_the_epoch_with_an_error_and_without_a_long_wait():
    killing = acting({(1, 3): kill_self}, 200)
    check_raises(
        RuntimeError, "DataLoader worker", plain(StreamDataset(range(12), killing, 2, "data", time_steps=1), 2)
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_parts_are_not_collated_unless_by_a_function_of_the_users(workers):
    dataset = StreamDataset([3, 2], range, 2, time_steps=3)
    check_raises(TypeError, "use StreamDataLoader.* with batch_size=None", DataLoader(dataset, num_workers=workers))
    own = DataLoader(dataset, batch_size=1, num_workers=min(workers, 1), collate_fn=lambda parts: parts[0].data.sum())
    assert sum(int(s) for s in own) == 4


def test_a_source_that_is_skipped_again_and_again_warns_once():
    gone = acting({(n, 0): raising(OSError) for n in range(2)})
    options = {"time_steps": 2, "on_error": "skip", "sections": sections([8, 8], 2, jitter=False), "seed": 0}
    dataset = StreamDataset(range(2), gone, 2, **options)
    for parts in (dataset, StreamDataLoader(dataset)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert list(parts) == []
        assert sorted(re.findall(r"source (\d)", " ".join(str(one.message) for one in caught))) == ["0", "1"]
