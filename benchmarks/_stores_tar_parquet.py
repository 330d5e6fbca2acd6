"""Streams out of WebDataset's tars and Parquet files, against the usual ways to read them.

Both sides deliver the same frames to batches of the same size, with two workers, from files that are in the page cache.
"""

from __future__ import annotations

import functools
import io
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from interleaved import Result, Row
from store_rows import bytes_of, in_turns, rate_of, row_of, without
from torch.utils.data import DataLoader, Dataset

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.stores import ParquetStore, Store, WebDatasetStore

LANES, STEPS, WORKERS = 8, 16, 2


def rows(quick: bool) -> Iterator[Row]:
    """A row for tars, where webdataset is installed, and one for Parquet."""
    with tempfile.TemporaryDirectory() as folder:
        yield from tar_rows(Path(folder), quick)
        yield from parquet_rows(Path(folder), quick)


def compared(name: str, store: Store, theirs: Callable[[], float], folder: Path, note: str, quick: bool) -> Result:
    """Return how many times faster a store is."""
    rates = in_turns({"ours": lambda: streamed(store), "theirs": theirs}, name, quick)
    return row_of(name, rates, "ours", "theirs", None, bytes_of(folder), note)


def streamed(store: Store) -> float:
    """Time steps a second of a store in batches of windows."""
    dataset = StreamDataset(
        store.sources, store, batch_size=LANES, time_steps=STEPS, seed=0, shuffle=False, lengths=store.lengths
    )
    return rate_of(StreamDataLoader(dataset, num_workers=WORKERS), lambda batch: int(batch.mask.sum()))


def tar_rows(folder: Path, quick: bool) -> Iterator[Row]:
    """JPEG frames in tars, against the package webdataset."""
    name = "tars of JPEG frames, against webdataset's loader"
    if missing := without("webdataset", name):
        yield missing
        return
    import webdataset

    folder /= "tars"
    folder.mkdir()
    rng = np.random.default_rng(0)
    picture = cv2.resize(rng.integers(0, 256, (15, 23, 3), np.uint8), (360, 240), interpolation=cv2.INTER_CUBIC)
    for video in range(16):
        with tarfile.open(folder / f"video-{video:03d}.tar", "w") as tar:
            for step in range(64 if quick else 160):
                jpeg = cv2.imencode(".jpg", np.roll(picture, step, 1))[1].tobytes()
                info = tarfile.TarInfo(f"{video:03d}/{step:05d}.jpg")
                info.size = len(jpeg)
                tar.addfile(info, io.BytesIO(jpeg))
    store = WebDatasetStore(folder, layout="HWC")
    shards = sorted(str(path) for path in folder.glob("*.tar"))

    def theirs() -> float:
        dataset = webdataset.WebDataset(shards, shardshuffle=False).decode("rgb8").to_tuple("jpg")
        loader = webdataset.WebLoader(dataset, batch_size=LANES * STEPS, num_workers=WORKERS)
        return rate_of(loader, lambda batch: len(batch[0]))

    note = f"frames (240, 360, 3) uint8; webdataset {webdataset.__version__}"
    yield compared(name, store, theirs, folder, note, quick)


class TableRows(Dataset[Any]):
    """A row a sample; the file is opened once a worker, and the last row group that was read is kept."""

    def __init__(self, path: str, group_rows: int, count: int) -> None:
        self._path, self._group_rows, self._count = path, group_rows, count

    def __len__(self) -> int:
        return self._count

    @functools.cached_property
    def _file(self) -> Any:
        import pyarrow.parquet

        return pyarrow.parquet.ParquetFile(self._path)

    @functools.lru_cache(maxsize=2)  # noqa: B019 - it lives as long as the worker
    def _group(self, group: int) -> Any:
        return self._file.read_row_group(group, columns=["state"]).column("state").combine_chunks()

    def __getitem__(self, index: int) -> Any:
        return np.array(self._group(index // self._group_rows)[index % self._group_rows].values)


def parquet_rows(folder: Path, quick: bool) -> Iterator[Row]:
    """Rows of 64 numbers, against torch's loader over a dataset that reads row by row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder /= "parquet"
    folder.mkdir()
    episodes, length, group_rows = 16, 1000 if quick else 2000, 1000
    count = episodes * length
    numbers = np.random.default_rng(0).standard_normal((count, 64)).astype(np.float32)
    state = pa.FixedSizeListArray.from_arrays(pa.array(numbers.reshape(-1)), 64)
    path = os.path.join(folder, "steps.parquet")
    table = pa.table({"episode": np.repeat(np.arange(episodes), length), "state": state})
    pq.write_table(table, path, row_group_size=group_rows)
    store = ParquetStore(path, stream="episode", columns=["state"])

    def theirs() -> float:
        return rate_of(DataLoader(TableRows(path, group_rows, count), LANES * STEPS, num_workers=WORKERS), len)

    note = f"{count} rows of (64,) float32 in row groups of {group_rows}; pyarrow {pa.__version__}"
    yield compared("Parquet, against torch's DataLoader, a row a sample", store, theirs, folder, note, quick)
