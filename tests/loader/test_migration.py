"""Code written for pytorch-stream-dataloader 1.0 and for OpenEB runs after changing its import.

Both are written here as their users write them: positional arguments, windows cut by the stream itself, a
collate function of the lanes' windows.
"""

import itertools
import random

import numpy as np
import pytest
import torch
from helpers import random_cases
from hypothesis import given
from hypothesis import strategies as st

from stream_dataloader import StreamDataLoader, StreamDataset, split_batch_size, split_dataset_sizes


class LetterStream:
    """The peers' idea of a streamer: called with a source, gives an iterable of windows."""

    def __init__(self, word, num_tbins=3):
        self.codes, self.num_tbins = torch.tensor(list(word.encode())), num_tbins

    def __iter__(self):
        for start, window in enumerate(self.codes.split(self.num_tbins)):
            yield window, start == 0


WORDS = ["aaabbbccc", "ddd", "eeefff", "ggghhh", "iii"]


def cat_windows(windows):
    frames, starts = zip(*windows, strict=True)
    return {"data": torch.stack(frames, 1), "reset": torch.tensor(starts)}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("padding_mode", ["zeros", "data"])
def test_code_for_pytorch_stream_dataloader(num_workers, padding_mode):
    fill_value = (torch.zeros(3, dtype=int), False) if padding_mode == "zeros" else None
    dataset = StreamDataset(WORDS, LetterStream, 2, padding_mode, fill_value)
    rows = ["", ""]
    for batch in StreamDataLoader(dataset, num_workers, cat_windows):
        assert batch["data"].shape == (3, 2)
        for lane in range(2):
            rows[lane] += bytes(batch["data"][:, lane].tolist()).decode().replace("\0", "")
    assert all(word in rows[0] or word in rows[1] for word in WORDS)
    assert len("".join(rows)) == sum(map(len, WORDS)) or padding_mode == "data"


def events_to_device(batch):
    """As OpenEB's collate functions do: a dict of tensors and lists."""
    data = [item["inputs"] for item in batch]
    return {
        "inputs": torch.cat([d[:, None] for d in data], 1),
        "mask_keep_memory": torch.tensor([not item["is_first"] for item in batch]).float().view(-1, 1),
        "labels": [item["labels"] for item in batch],
    }


def event_stream(path, num_tbins=2, height=4, width=6):
    for i in range(int(path.split("_")[1])):
        inputs = torch.full((num_tbins, 2, height, width), float(i))
        yield {"inputs": inputs, "is_first": i == 0, "labels": [f"{path}:{i}"]}


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_code_for_openeb(num_workers):
    paths = [f"rec_{n}" for n in (3, 1, 4, 2, 5, 1)]
    idle = {"inputs": torch.zeros(2, 2, 4, 6), "is_first": True, "labels": []}
    dataset = StreamDataset(paths, event_stream, 3, "zeros", idle, 42)
    loader = StreamDataLoader(dataset, num_workers, events_to_device).to(torch.device("cpu"))
    assert loader.batch_size == 3
    seen = []
    for batch in loader:
        assert (batch["inputs"].shape, batch["mask_keep_memory"].shape) == ((2, 3, 2, 4, 6), (3, 1))
        seen += itertools.chain(*batch["labels"])
    assert sorted(seen) == sorted(f"{path}:{i}" for path in paths for i in range(int(path[4:])))


def open_drawing(length):
    """As streams for OpenEB do: draws from global generators, which its `seed` seeds, too."""
    for _ in range(length):
        yield random.random(), np.random.rand(), torch.rand(()).item()  # noqa: NPY002


def test_draws_from_global_generators_repeat_with_one_worker():
    runs = []
    for seed in (0, 0, 1):
        loader = StreamDataLoader(StreamDataset([5, 3, 4], open_drawing, 3, "zeros", 0, seed, time_steps=2), 1)
        runs.append([[leaf.tolist() for leaf in batch.data] for batch in loader])
        torch.rand(())  # what is drawn in the main process is another matter
    assert runs[0] == runs[1] != runs[2]


@random_cases(400)
@given(st.integers(0, 40), st.integers(1, 12), st.integers(1, 15))
def test_split_dataset_sizes_deals_sources_as_lanes_are_dealt(count, lanes, workers):
    """What both packages' users rely on, and their tests check: all sources, in order, and enough for each lane."""
    sources, sizes = list(range(count)), split_batch_size(lanes, workers)
    shares = split_dataset_sizes(sources, sizes)
    assert [source for share in shares for source in share] == sources
    assert len(shares) == len(sizes)
    for share, size in zip(shares, sizes, strict=True):
        assert abs(len(share) - count * size / lanes) < 1
        assert len(share) >= size or count < lanes


@pytest.mark.parametrize("sizes", [[], [0, 0], [3, -1]])
def test_split_dataset_sizes_of_no_lanes_is_an_error(sizes):
    with pytest.raises(ValueError, match="split_sizes"):
        split_dataset_sizes(["a"], sizes)
