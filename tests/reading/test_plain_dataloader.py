"""torch's own `DataLoader` over a `StreamDataset`: parts tagged with their worker id."""

import copy
import itertools
import multiprocessing
import pickle
import re
import traceback
import warnings

import numpy as np
import pytest
import torch
from cases import Case, cases, key
from helpers import START_METHODS, random_cases
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from worker_streams import acting, kill_self, raising

from stream_dataloader import Sections, StreamDataLoader, StreamDataset, regroup
from stream_dataloader.errors import ItemError, ReadError

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
        assert part.batch_index == seen.get(worker, -1) + 1
        seen[worker] = part.batch_index
        whole = batches[part.batch_index]
        marks = ["is_last"] if whole.is_last is not None else []
        for name in ("data", "mask", "source_index", "position", "is_first", *marks):
            assert torch.equal(getattr(part, name), getattr(whole, name)[:, part.lane])
        count += int(part.mask.sum())
    assert count == sum(int(batch.mask.sum()) for batch in batches)


@random_cases(60, quick=3)
@given(cases(max_streams=12, max_length=8, max_lanes=5), st.integers(0, 4), st.integers(1, 3))
def test_parts_are_those_of_the_batches(case, workers, prefetch_factor):
    batches = list(StreamDataLoader(case.dataset()))
    options = {"prefetch_factor": prefetch_factor} if workers else {}
    check_parts(plain(case.dataset(), workers, **options), batches)


@random_cases(300, quick=4)
@given(
    cases(max_streams=12, max_length=8, max_lanes=5, modes=("zeros", "data", "drop", "cycle"), marks=True),
    st.integers(0, 3),
    st.integers(1, 3),
)
def test_regrouped_parts_are_the_batches(case, workers, prefetch_factor):
    options = {"prefetch_factor": prefetch_factor, "persistent_workers": True} if workers else {}
    loader, parts = (
        StreamDataLoader(case.dataset(), min(workers, case.lanes)),
        regroup(plain(case.dataset(), workers, **options)),
    )
    for epoch in range(1 if case.padding_mode == "cycle" else 2):
        expected, found = (
            [key(batch, worker_id=True, seeds=True) for batch in itertools.islice(batches, 20)]
            for batches in (loader, parts)
        )
        for step, (batch, other) in enumerate(itertools.zip_longest(found, expected)):
            assert batch == other, f"epoch {epoch}, step {step}"


def ragged(n):
    """Whole windows of unequal lengths, in them an array, a number and text, also of a dtype that NumPy lacks."""
    for i in range(n):
        steps = 1 + (i + n) % 3
        yield {
            "x": np.full((steps, 2), 10 * n + i, np.float32),
            "text": [str(i)] * steps,
            "bfloat": torch.full((steps,), i, dtype=torch.bfloat16),
        }


def described(batches):
    return [(str(batch.data), batch.mask.tolist(), batch.position.tolist()) for batch in batches]


@pytest.mark.parametrize("workers", [2, 3])
def test_regrouped_windows_of_the_streams_own_lengths(workers):
    def dataset():
        return StreamDataset([5, 1, 3, 2, 4], ragged, 4, fill_value={"x": 7}, seed=0, windows="given")

    expected = described(StreamDataLoader(dataset()))
    assert len(expected) > 3
    assert described(regroup(plain(dataset(), workers))) == expected


def test_regrouping_refuses_what_it_cannot_put_side_by_side():
    dataset = StreamDataset([0, 1], lambda n: iter([np.zeros(n + 1)] * 3), 2, time_steps=2)
    check_raises(ItemError, r"source 1 .*does not fit beside the epoch's first", regroup(plain(dataset, 2)))
    for loader, text in [
        (StreamDataLoader(dataset), "torch's DataLoader"),
        (DataLoader([1, 2]), "over a list"),
        (DataLoader(dataset, batch_size=2), "batch_size=None"),
    ]:
        with pytest.raises(TypeError, match=text):
            regroup(loader)
    with pytest.raises(TypeError, match="collate_fn turned a part into a Tensor"):
        next(iter(regroup(plain(CASE.dataset(), 0, collate_fn=lambda part: part.data))))
    with pytest.raises(ValueError, match="only batches that come straight"):
        next(iter(regroup(plain(CASE.dataset(), 0)))).state_dict()


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
def test_of_broken_streams_the_lowest_lanes_is_an_error_that_names_it(workers):
    broken = acting({(0, 1): raising(OSError), (1, 0): raising(OSError)})
    check_raises(ReadError, r"source 0 .*item 1", plain(StreamDataset(range(4), broken, 4, time_steps=2), workers))


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
    options = {"time_steps": 2, "on_error": "skip", "sections": Sections(2, jitter=False, lengths=[8, 8]), "seed": 0}
    dataset = StreamDataset(range(2), gone, 2, **options)
    for parts in (dataset, StreamDataLoader(dataset)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert list(parts) == []
        assert sorted(re.findall(r"source (\d)", " ".join(str(one.message) for one in caught))) == ["0", "1"]


def test_set_epoch_holds_in_processes_that_iterate_later():
    dataset = StreamDataset([3, 2], range, 1, time_steps=1)
    dataset.set_epoch(7)
    read, told = multiprocessing.get_context("fork").Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=lambda: told.send(next(iter(dataset)).epoch))
    child.start()
    assert read.recv() == 7
    child.join()
    assert next(iter(dataset)).epoch == 7


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda dataset: pickle.loads(pickle.dumps(dataset))])
def test_a_copy_of_a_dataset_counts_epochs_on_from_the_same_one(copied):
    dataset = StreamDataset([3, 2], range, 2, time_steps=2)
    assert {part.epoch for part in plain(dataset, 0)} == {0}
    for one in (copied(dataset), dataset):
        assert {part.epoch for part in plain(one, 0)} == {1}
