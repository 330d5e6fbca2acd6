"""What an MDS dataset costs to read: two workers, against mosaicml-streaming's own reader on the same files.

Samples are pictures (64, 64, 3) uint8 and a label, in shards of 64 MB that are not compressed, in a local folder; they
are read in order. Ours are streams of a shard each, 16 lanes of 16 steps; theirs are batches of 256 samples by torch's
`DataLoader`, with as many workers. Both take turns; see `interleaved`. It runs where mosaicml-streaming is installed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from stream_dataloader import StreamDataLoader, StreamDataset, stores

LEAST = 3.0
WORKERS, LANES, STEPS = 2, 16, 16
RUNS = 5


def write(folder: str, count: int) -> None:
    """Write a dataset of `count` samples, in 32 streams."""
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (64, 64, 64, 3), np.uint8)
    columns = {"image": "ndarray:uint8:64,64,3", "label": "int", "episode": "int"}
    with stores.MdsWriter(folder, columns=columns) as writer:
        for index in range(count):
            writer.write({"image": pictures[index % 64], "label": index, "episode": index * 32 // count})


def _samples_a_second(batches: Any, samples_of: Callable[[Any], int]) -> float:
    """Read all batches; what comes with the first is not counted, as workers start meanwhile."""
    iterator = iter(batches)
    next(iterator)
    start, count = time.perf_counter(), 0
    for batch in iterator:
        count += samples_of(batch)
    return count / (time.perf_counter() - start)


def _ours(folder: str) -> float:
    sources, store = stores.open(folder, stream="episode", columns=["image", "label"])
    dataset = StreamDataset(sources, store, LANES, time_steps=STEPS, lengths=store.lengths)
    return _samples_a_second(StreamDataLoader(dataset, WORKERS), lambda batch: int(batch.data["label"].numel()))


def _theirs(folder: str) -> float:
    import streaming
    from torch.utils.data import DataLoader

    dataset = streaming.StreamingDataset(local=folder, shuffle=False, batch_size=LANES * STEPS)
    loader = DataLoader(dataset, batch_size=LANES * STEPS, num_workers=WORKERS)
    return _samples_a_second(loader, lambda batch: len(batch["label"]))


def rows(quick: bool) -> list[tuple[str, float, float | None, str]]:
    """Name, ratio, target, and a note with the bytes on disk; none where mosaicml-streaming is not installed."""
    if importlib.util.find_spec("streaming") is None:
        return []
    folder = tempfile.mkdtemp()
    try:
        path = os.path.join(folder, "data")
        write(path, 8192 if quick else 20480)
        ours, theirs = [], []
        for _ in range(RUNS):
            ours.append(_ours(path))
            theirs.append(_theirs(path))
        disk = sum(os.stat(os.path.join(path, name)).st_size for name in os.listdir(path))
    finally:
        shutil.rmtree(folder)
    mine, his = statistics.median(ours), statistics.median(theirs)
    note = f"{mine:,.0f} samples a second against {his:,.0f}; {disk:,} bytes on disk"
    return [("MDS, 2 workers, against mosaicml-streaming and DataLoader", mine / his, LEAST, note)]


if __name__ == "__main__":
    import sys

    for row in rows("--quick" in sys.argv):
        print(row)
