"""Pictures that are read as windows, as `time_steps` was forgotten, are told once; honest windows are not."""

import re
import warnings

import numpy as np
import pytest
import torch

from stream_dataloader import StreamDataLoader, StreamDataset


def dataset_of(item, **options):
    """Streams whose items are all alike."""
    return StreamDataset([2, 3, 1], lambda length: iter([item] * length), 2, **options)


def told(batches):
    """The warnings of reading all."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in batches:
            pass
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("workers", [0, 2])
def test_pictures_without_time_steps_are_told_once_a_loader(workers):
    dataset = dataset_of({"frame": torch.zeros(3, 8, 8), "label": 1})
    loader = StreamDataLoader(dataset, workers)
    (message,) = told(loader)
    assert "item['frame'], float32 (3, 8, 8), is read as 3 steps of (8, 8)" in message
    assert told(loader) == told(loader.parts()) == []
    assert told(StreamDataLoader(dataset, workers).parts()) == [message]


PICTURES = [np.zeros((3, 8, 8), np.uint8), torch.zeros(4, 24, 32), *(np.zeros((20, 30, c), np.uint8) for c in (3, 4))]


@pytest.mark.parametrize("picture", PICTURES)
def test_pictures_are_told_once_without_a_loader(picture):
    dataset = dataset_of(picture)
    assert len(told(dataset)) == 1
    assert told(dataset) == told(dataset_of(picture, time_steps=1)) == []


HONEST = [
    np.zeros((3, 1, 8, 8), np.uint8),  # with an axis for channels
    np.zeros((4, 3, 8, 8), np.uint8),
    np.zeros((1, 8, 8), np.uint8),
    np.zeros((5, 8, 8), np.uint8),
    np.zeros((3,), np.uint8),
    np.zeros((4, 100), np.float32),
    np.zeros((3, 7, 30), np.float32),
    np.zeros((100, 20, 3), np.float32),  # points
    np.zeros((16, 3), np.uint8),
    {"depth": np.zeros((4, 8, 8)), "frame": np.zeros((4, 3, 8, 8))},
    {"frame": np.zeros((3, 8, 8)), "seconds": np.zeros(3)},
    (["a", "b", "c"], np.zeros(3)),
]


@pytest.mark.parametrize("window", HONEST)
def test_honest_windows_are_not_told(window):
    assert told(StreamDataLoader(dataset_of(window))) == []


def test_windows_of_different_lengths_and_those_of_a_collate_fn_are_honest():
    sources = [np.zeros((n, 8, 8), np.uint8) for n in (3, 2)]
    assert told(StreamDataLoader(StreamDataset(sources, lambda window: iter([window]), 2))) == []
    assert told(StreamDataLoader(dataset_of(sources[0]), 0, list)) == []


def test_one_who_means_it_can_say_so():
    dataset = dataset_of(np.zeros((3, 8, 8), np.uint8))
    (message,) = told(StreamDataLoader(dataset))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning):
            list(StreamDataLoader(dataset))
        exec(re.search(r"warnings\.filterwarnings\(.*\)", message)[0])
        assert list(StreamDataLoader(dataset))
