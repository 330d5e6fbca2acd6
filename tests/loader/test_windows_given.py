"""Whether an item is a time step or a whole window is said, never guessed."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from stream_dataloader import StreamDataLoader, StreamDataset, interleave, regroup, stores, streams

WINDOW = np.arange(24, dtype=np.float32).reshape(3, 8)
BOTH_WAYS_OUT = r'pass time_steps=T to StreamDataset if .*, or windows="given" if'


def dataset_of(**options):
    return StreamDataset([2, 1], lambda count: iter([WINDOW] * count), 2, **options)


READERS = {
    "loader": StreamDataLoader,
    "loader with workers": lambda dataset: StreamDataLoader(dataset, 2),
    "parts, of a loader with a collate_fn": lambda dataset: StreamDataLoader(dataset, 0, list).parts(),
    "dataset": iter,
    "torch's DataLoader": lambda dataset: next(iter(DataLoader(dataset, batch_size=None, num_workers=1))),
    "regroup": lambda dataset: next(iter(regroup(DataLoader(dataset, batch_size=None)))),
    "interleave": lambda dataset: StreamDataLoader(interleave([dataset, dataset])),
    "pack": lambda dataset: stores.pack(dataset, "/nowhere/at/all"),
}


@pytest.mark.parametrize("reader", READERS)
def test_neither_is_an_error_that_says_both_ways_out(reader):
    with pytest.raises(ValueError, match=BOTH_WAYS_OUT):
        READERS[reader](dataset_of())


@pytest.mark.parametrize("workers", [0, 2])
def test_a_collate_fn_needs_neither(workers):
    (first, second) = StreamDataLoader(dataset_of(fill_value="idle"), workers, list)
    assert [torch.as_tensor(window).shape for window in first] == [(3, 8), (3, 8)]
    assert second[1] == "idle"


@pytest.mark.parametrize("collate_fn", [None, list])
def test_given_windows_are_batches_in_each_way_to_read(collate_fn):
    loader = StreamDataLoader(dataset_of(windows="given"), 0, collate_fn)
    assert len(list(loader)) == 2
    parts = [*loader.parts(), *dataset_of(windows="given"), *regroup(DataLoader(dataset_of(windows="given"), None))]
    assert [part.data.shape for part in parts] == [(3, 2, 8)] * 6


def test_given_windows_and_time_steps_are_an_error():
    with pytest.raises(ValueError, match=r'time_steps is 4, and windows="given" means .*; leave out one of the two'):
        dataset_of(windows="given", time_steps=4)


FACTORIES = [
    streams.ArrayStream(),
    streams.AudioStream(window=100),
    streams.AudioVisualStream(),
    streams.CameraStream(),
    streams.ImageFolderStream(),
    streams.TextStream(),
    streams.VideoStream(),
]


@pytest.mark.parametrize("factory", FACTORIES, ids=lambda factory: type(factory).__name__)
@pytest.mark.parametrize("windows", ["aligned", "given"])
def test_streams_of_the_library_yield_time_steps_whatever_is_said(factory, windows):
    with pytest.raises(ValueError, match=f"{type(factory).__name__} yields single time steps; pass time_steps="):
        StreamDataset(["source"], factory, 1, windows=windows)


def test_stores_yield_time_steps_whatever_is_said(tmp_path):
    stores.pack(([3, 4], range), tmp_path / "store")
    with pytest.raises(ValueError, match="MemmapStore yields single time steps; pass time_steps="):
        StreamDataset(*stores.open(tmp_path / "store"), 1, windows="given")


def test_windows_are_padded_to_the_length_of_their_streams_first():
    dataset = StreamDataset([0], lambda _: map(np.ones, (2, 1, 1)), batch_size=1, windows="given")
    assert [batch.mask.tolist() for batch in StreamDataLoader(dataset)] == [
        [[True], [True]],
        [[True], [False]],
        [[True], [False]],
    ]
