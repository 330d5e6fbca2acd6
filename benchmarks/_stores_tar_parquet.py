"""Streams out of WebDataset's tars and Parquet files, against the usual ways to read them.

Both sides deliver the same frames to batches of the same size, with two workers, from files that are in the page cache.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import os
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from interleaved import take_turns
from torch.utils.data import DataLoader, Dataset

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.stores import ParquetStore, Store, WebDatasetStore

LANES, STEPS, WORKERS = 8, 16, 2


def rows(quick: bool) -> list[tuple[str, float, float | None, str]]:
    """Name, ratio, target and a note, a row each."""
    with tempfile.TemporaryDirectory() as folder:
        return [*tar_rows(Path(folder), quick), *parquet_rows(Path(folder), quick)]


def seconds_of(make: Callable[[], Iterable[Any]]) -> float:
    """How long a loader takes for all of its batches, its workers' start left out."""
    batches = iter(make())
    next(batches)
    began = time.perf_counter()
    for _ in batches:
        pass
    return time.perf_counter() - began


def faster(ours: Callable[[], Iterable[Any]], other: Callable[[], Iterable[Any]], quick: bool) -> float:
    """How many times faster ours is."""
    contenders = {"ours": lambda: seconds_of(ours), "other": lambda: seconds_of(other)}
    took = take_turns(contenders, 1 if quick else 5)
    return statistics.median(b / a for a, b in zip(took["ours"], took["other"], strict=True))


def streamed(store: Store) -> Iterable[Any]:
    """A store in batches of windows."""
    dataset = StreamDataset(
        store.sources, store, batch_size=LANES, time_steps=STEPS, seed=0, shuffle=False, lengths=store.lengths
    )
    return StreamDataLoader(dataset, num_workers=WORKERS)


def megabytes(folder: Path) -> str:
    """What the files of a folder take."""
    return f"{sum(file.stat().st_size for file in folder.iterdir()) / 1e6:.1f} MB"


def tar_rows(folder: Path, quick: bool) -> list[tuple[str, float, float | None, str]]:
    """JPEG frames in tars, against the package webdataset."""
    if importlib.util.find_spec("webdataset") is None:
        return []
    import webdataset

    folder /= "tars"
    folder.mkdir()
    rng = np.random.default_rng(0)
    picture = cv2.resize(rng.integers(0, 256, (15, 23, 3), np.uint8), (360, 240), interpolation=cv2.INTER_CUBIC)
    for video in range(8 if quick else 16):
        with tarfile.open(folder / f"video-{video:03d}.tar", "w") as tar:
            for step in range(32 if quick else 160):
                jpeg = cv2.imencode(".jpg", np.roll(picture, step, 1))[1].tobytes()
                info = tarfile.TarInfo(f"{video:03d}/{step:05d}.jpg")
                info.size = len(jpeg)
                tar.addfile(info, io.BytesIO(jpeg))
    store = WebDatasetStore(folder, layout="HWC")
    shards = sorted(str(path) for path in folder.glob("*.tar"))

    def theirs() -> Iterable[Any]:
        dataset = webdataset.WebDataset(shards, shardshuffle=False).decode("rgb8").to_tuple("jpg")
        batches: Iterable[Any] = webdataset.WebLoader(dataset, batch_size=LANES * STEPS, num_workers=WORKERS)
        return batches

    note = f"16 tars of 160 JPEG frames, 240 x 360, uint8: {megabytes(folder)}; webdataset {webdataset.__version__}"
    return [
        (
            "tars of JPEG frames, against the webdataset package's loader",
            faster(lambda: streamed(store), theirs, quick),
            None,
            note,
        )
    ]


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


def parquet_rows(folder: Path, quick: bool) -> list[tuple[str, float, float | None, str]]:
    """Rows of 64 numbers, against torch's loader over a dataset that reads row by row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder /= "parquet"
    folder.mkdir()
    episodes, length, group_rows = 16, 200 if quick else 2000, 1000
    count = episodes * length
    numbers = np.random.default_rng(0).standard_normal((count, 64)).astype(np.float32)
    state = pa.FixedSizeListArray.from_arrays(pa.array(numbers.reshape(-1)), 64)
    path = os.path.join(folder, "steps.parquet")
    table = pa.table({"episode": np.repeat(np.arange(episodes), length), "state": state})
    pq.write_table(table, path, row_group_size=group_rows)
    store = ParquetStore(path, key="episode", columns=["state"])

    def theirs() -> Iterable[Any]:
        return DataLoader(TableRows(path, group_rows, count), batch_size=LANES * STEPS, num_workers=WORKERS)

    note = f"{count} rows of (64,) float32 in row groups of {group_rows}: {megabytes(folder)}; pyarrow {pa.__version__}"
    return [
        (
            "Parquet, against torch's DataLoader reading a row a sample",
            faster(lambda: streamed(store), theirs, quick),
            None,
            note,
        )
    ]


if __name__ == "__main__":
    for row in rows(quick=False):
        print(*row, sep=" | ")
