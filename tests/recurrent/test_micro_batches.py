"""`StreamBatch.split_lanes`."""

import dataclasses

import numpy as np
import pytest
import torch

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.testing.resume import batch_key


def open_items(length):
    for t in range(length):
        yield {"x": torch.tensor([length + t / 8]), "name": f"{length}/{t}", "deep": (np.int64(t), [t])}


def batches_of(**options):
    return StreamDataLoader(StreamDataset([7, 3, 5, 1, 4, 2, 6], open_items, 5, time_steps=2, **options))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_micro_batches_are_the_batch_lane_by_lane(count):
    for batch in batches_of(mark_ends=True):
        parts = batch.split_lanes(count)
        assert [len(part) for part in parts] == {1: [5], 2: [3, 2], 3: [2, 2, 1], 5: [1] * 5}[count]
        for name in ("reset", "worker_id", "lane"):
            assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(batch, name))
        for name in ("is_first", "mask", "source_index", "position", "is_last"):
            assert torch.equal(torch.cat([getattr(part, name) for part in parts], 1), getattr(batch, name))
        for leaf in (lambda data: data["x"], lambda data: data["deep"][0]):
            assert torch.equal(torch.cat([leaf(part.data) for part in parts], 1), leaf(batch.data))
        for leaf in (lambda data: data["name"], lambda data: data["deep"][1]):
            for t in range(2):
                assert [item for part in parts for item in leaf(part.data)[t]] == leaf(batch.data)[t]
        assert all((part.batch_index, part.epoch) == (batch.batch_index, batch.epoch) for part in parts)
        assert parts[-1].state_dict() == batch.state_dict()
        assert parts[0].data["x"].data_ptr() == batch.data["x"].data_ptr()  # nothing is copied
        assert batch_key(parts[0].split_lanes(1)[0]) == batch_key(parts[0])


@pytest.mark.parametrize(("count", "error"), [(0, ValueError), (6, ValueError), (2.0, TypeError), (True, TypeError)])
def test_a_number_that_is_none_is_refused(count, error):
    with pytest.raises(error, match="count"):
        next(iter(batches_of())).split_lanes(count)


def test_micro_batches_of_a_moved_batch_keep_their_flags_in_host_memory():
    for batch in batches_of():
        there = {"x": batch.data["x"]}
        parts = dataclasses.replace(batch, data=there).to("meta").split_lanes(3)
        for part, expected in zip(parts, batch.split_lanes(3), strict=True):
            assert part.data["x"].device.type == "meta"
            for name in ("reset", "is_first", "mask", "source_index", "position", "lane", "worker_id"):
                assert torch.equal(getattr(part.host, name), getattr(expected, name))
