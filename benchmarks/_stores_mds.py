"""Cost of reading an MDS dataset: two workers, against mosaicml-streaming's own reader on the same files.

Samples are pictures (64, 64, 3) uint8 and a label, in shards of 64 MB that are not compressed, in a local folder; they
are read in order. Ours are streams of a shard each, 16 lanes of 16 steps; theirs are batches of 256 samples by torch's
`DataLoader`, with as many workers. Both take turns; see `interleaved`. It runs where mosaicml-streaming is installed.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator
from functools import partial

import numpy as np
from interleaved import Row
from store_rows import bytes_of, in_turns, rate_of, row_of, without

from stream_dataloader import StreamDataLoader, StreamDataset, stores

LEAST = 3.0
WORKERS, LANES, STEPS = 2, 16, 16


def write(folder: str, count: int) -> None:
    """Write a dataset of `count` samples, in 32 streams."""
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (64, 64, 64, 3), np.uint8)
    columns = {"image": "ndarray:uint8:64,64,3", "label": "int", "episode": "int"}
    with stores.MdsWriter(folder, columns=columns) as writer:
        for index in range(count):
            writer.write({"image": pictures[index % 64], "label": index, "episode": index * 32 // count})


def _ours(folder: str) -> float:
    sources, store = stores.open(folder, stream="episode", columns=["image", "label"])
    dataset = StreamDataset(sources, store, LANES, time_steps=STEPS, lengths=store.lengths)
    return rate_of(StreamDataLoader(dataset, WORKERS), lambda batch: int(batch.mask.sum()))


def _theirs(folder: str) -> float:
    import streaming
    from torch.utils.data import DataLoader

    dataset = streaming.StreamingDataset(local=folder, shuffle=False, batch_size=LANES * STEPS)
    loader = DataLoader(dataset, batch_size=LANES * STEPS, num_workers=WORKERS)
    return rate_of(loader, lambda batch: len(batch["label"]))


def rows(quick: bool) -> Iterator[Row]:
    """One row, where mosaicml-streaming is installed."""
    name = "MDS, against mosaicml-streaming and DataLoader"
    if missing := without("streaming", name):
        yield missing
        return
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "data")
        write(path, 8192 if quick else 20480)
        rates = in_turns({"ours": partial(_ours, path), "theirs": partial(_theirs, path)}, name, quick)
        one, other = (statistics.median(rates[who]) for who in ("ours", "theirs"))
        note = f"{one:,.0f} samples/s against {other:,.0f}"
        yield row_of(name, rates, "ours", "theirs", LEAST, bytes_of(path), note)
