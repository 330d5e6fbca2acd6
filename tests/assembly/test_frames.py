"""Pictures that are read as windows, as `time_steps` was forgotten, are told once; honest windows are not."""

import re
import warnings

import numpy as np
import pytest
import torch

from stream_dataloader import StreamDataLoader, StreamDataset


def repeated(item):
    """Opens streams of as many items as their source says, all alike."""
    return lambda length: iter([item] * length)


def told(batches):
    """The warnings of reading all."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in batches:
            pass
    return [str(warning.message) for warning in caught]


def loader_of(item, workers=0, *args, **options):
    return StreamDataLoader(StreamDataset([2, 3, 1], repeated(item), 2, **options), workers, *args)


@pytest.mark.parametrize("workers", [0, 2])
def test_pictures_without_time_steps_are_told_once_a_loader(workers):
    item = {"frame": torch.zeros(3, 8, 8), "label": 1}
    loader = loader_of(item, workers)
    (message,) = told(loader)
    assert "item['frame'], float32 (3, 8, 8), is read as 3 steps of (8, 8)" in message
    assert told(loader) == told(loader.parts()) == []
    assert told(loader_of(item, workers).parts()) == [message]
    assert told(loader_of(item, workers, time_steps=1)) == []


@pytest.mark.parametrize(
    "picture",
    [np.zeros((3, 8, 8), np.uint8), torch.zeros(4, 24, 32), np.zeros((8, 9, 3), np.uint8), np.zeros((20, 30, 4), "u1")],
)
def test_pictures_are_told_once_without_a_loader(picture):
    dataset = StreamDataset([2, 3], repeated(picture), 2)
    assert len(told(dataset)) == 1
    assert told(dataset) == []


@pytest.mark.parametrize(
    "window",
    [
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
        ["a", "b", "c"],
    ],
)
def test_honest_windows_are_not_told(window):
    item = (window, np.zeros(len(window))) if type(window) is list else window
    assert told(loader_of(item)) == []


def test_windows_of_different_lengths_and_those_of_a_collate_fn_are_honest():
    sources = [np.zeros((n, 8, 8), np.uint8) for n in (3, 2)]
    assert told(StreamDataLoader(StreamDataset(sources, lambda window: iter([window]), 2))) == []
    assert told(loader_of(torch.zeros(3, 8, 8), 0, list)) == []


def test_one_who_means_it_can_say_so():
    item = np.zeros((3, 8, 8), np.uint8)
    (message,) = told(loader_of(item))
    remedy = re.search(r"warnings\.filterwarnings\(.*\)", message)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(remedy)
        list(loader_of(item))
