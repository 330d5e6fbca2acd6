"""LeRobot datasets, against lerobot's own `LeRobotDataset`: its frames in lanes are the batches of our store."""

import itertools

import lerobot_data as data
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from stream_dataloader import (
    Anchors,
    LaneBatchSampler,
    StreamDataLoader,
    StreamDataset,
    collate_lanes,
    lane_dataset,
    stores,
)

pytest.importorskip("lerobot")
pandas = pytest.importorskip("pandas")

import tqdm  # noqa: E402
from lerobot.datasets.lerobot_dataset import LeRobotDataset  # noqa: E402

LENGTHS = (6, 11, 20, 9)
tqdm.tqdm.monitor_interval = 0  # its thread would be left behind


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pictures in the tables, as lerobot reads videos by torchvision or torchcodec, which are not here."""
    folder = data.write_v3(tmp_path_factory.mktemp("lerobot") / "own", LENGTHS, kind="image")
    tasks = pandas.DataFrame({"task_index": range(len(data.TASKS))}, index=list(data.TASKS))
    tasks.to_parquet(folder / "meta/tasks.parquet")  # as lerobot does
    return folder


def theirs_of(folder, **options):
    dataset = LeRobotDataset("me/own", root=folder, delta_timestamps={"action": [0, 0.1, 0.2]})
    lengths = [episode["length"] for episode in dataset.meta.episodes]
    sampler = LaneBatchSampler(lengths=lengths, **options)
    return DataLoader(lane_dataset(dataset), batch_sampler=sampler, collate_fn=collate_lanes), sampler


def ours_of(folder, **options):
    sources, store = stores.open(folder, deltas={"action": range(3)})
    dataset = StreamDataset(sources, store, **options)
    return StreamDataLoader(dataset, num_workers=1)


def assert_alike(ours, theirs):
    for name in ("mask", "is_first", "is_last", "reset", "source_index", "position", "stream_seed", "lane"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert (ours.batch_index, ours.epoch) == (theirs.batch_index, theirs.epoch)
    shared = ours.data.keys() & theirs.data.keys()
    assert shared >= {"observation.state", "action", "timestamp", "frame_index", "index", "task", *data.CAMERAS}
    real = theirs.source_index >= 0
    for name in shared:
        one, other = ours.data[name], theirs.data[name]
        if name == "task":
            cells = [(one[t][b], other[t][b]) for t, b in real.nonzero().tolist()]
            assert all(text == given for text, given in cells)
            continue
        one, other = torch.as_tensor(np.asarray(one))[real], torch.as_tensor(np.asarray(other))[real]
        if name in data.CAMERAS:
            one = one / 255
        assert torch.equal(one.to(other.dtype).reshape(other.shape), other), name


@pytest.mark.parametrize("windows", ["aligned", "packed"])
@pytest.mark.parametrize("anchors", [None, Anchors(4, first=True)])
def test_lanes_of_lerobots_dataset_are_the_batches_of_the_store(folder, windows, anchors):
    options = {"batch_size": 2, "time_steps": 4, "windows": windows, "shuffle": True, "seed": 3, "anchors": anchors}
    theirs, sampler = theirs_of(folder, **options)
    ours = ours_of(folder, **options)
    for _ in range(2):
        count = 0
        for one, other in itertools.zip_longest(ours, theirs):
            assert_alike(one, other)
            count += 1
        assert count == len(theirs)
    iterator = iter(theirs)
    used = next(iterator)
    later = list(iterator)
    again, other_sampler = theirs_of(folder, **options)
    other_sampler.load_state_dict(sampler.state_dict(used))
    for one, other in itertools.zip_longest(again, later):
        assert torch.equal(one.data["index"], other.data["index"])
        assert torch.equal(one.mask, other.mask)
