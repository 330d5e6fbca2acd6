"""The list of sources: packed, shared, and cheap to start with."""

import copy
import pathlib
import pickle
import sys
import tracemalloc

import numpy as np
import psutil
import pytest
from torch.utils.data import DataLoader, get_worker_info

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.sources import PackedSources


def paths(count):
    return [f"/data/recordings/day_{i % 365:03d}/camera_{i % 17:02d}/{i:09d}.mp4" for i in range(count)]


@pytest.mark.parametrize(
    "sources",
    [
        paths(1000),
        [],
        ["a", "b" * 100_000, "c"] * 50,
        [(p, 0, 10) for p in paths(70)],
        [pathlib.Path("/x")] * 3,
        range(65),
        [{"a": np.ones(2)}],
        (1, "x", None),
    ],
    ids=["paths", "none", "texts", "segments", "Path", "range", "dicts", "tuple"],
)
def test_packed_sources_are_a_sequence_of_equal_sources(sources):
    packed = PackedSources(sources)
    assert len(packed) == len(sources)
    for given in (packed, pickle.loads(pickle.dumps(packed)), copy.deepcopy(packed)):
        assert all(repr(a) == repr(b) for a, b in zip(given, sources, strict=True))
    assert repr(packed[-1:]) == repr(list(sources)[-1:])
    assert repr(packed[1:5]) == repr(list(sources)[1:5])
    with pytest.raises(IndexError, match="out of range"):
        packed[len(sources)]


def test_sources_may_hold_lambdas():
    assert PackedSources([lambda: 3])[0]() == 3


def growth_by_reading_all(_):
    """Bytes of its own that a worker adds by looking at every source."""
    sources, process = get_worker_info().dataset.sources, psutil.Process()
    before = process.memory_full_info().uss
    for i in range(len(sources)):
        assert sources[i]
    yield process.memory_full_info().uss - before


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_share_the_sources(method):
    count = 200_000
    dataset = StreamDataset(paths(count), growth_by_reading_all, 2, time_steps=1, lookahead=0)
    parts = iter(DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=method))
    grown = max(int(next(parts).data) for _ in range(2))
    a_copy = sum(map(sys.getsizeof, paths(count)))
    assert grown < a_copy / 20
    del parts


class Counted:
    """A source that knows how often it was pickled in this process."""

    pickled = 0

    def __reduce__(self):
        Counted.pickled += 1
        return Counted, ()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_sources_are_pickled_once_however_many_workers_there_are(method):
    Counted.pickled = 0
    dataset = StreamDataset([Counted() for _ in range(300)], lambda _: [1], 2, time_steps=1)
    for _ in range(2):
        assert len(list(StreamDataLoader(dataset, 2, multiprocessing_context=method))) == 150
    assert Counted.pickled == 300


def test_a_dataset_copied_elsewhere_is_a_dataset_of_its_own():
    dataset = StreamDataset([4, 3, 2], range, 2, time_steps=2, shuffle=True, seed=5)
    dataset.set_epoch(3)
    other = pickle.loads(pickle.dumps(dataset))
    first = [batch.source.tolist() for batch in dataset]
    assert [batch.source.tolist() for batch in other] == first
    assert next(batch.epoch for batch in other) == 4


def test_reading_a_large_source_does_not_read_its_neighbours():
    packed = PackedSources(["x" * 1_000_000 for _ in range(64)])
    tracemalloc.start()
    packed[17]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3_000_000
