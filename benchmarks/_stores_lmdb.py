"""LMDB of raw windows against torch's `DataLoader` over an LMDB that has a frame a value.

Both have two worker processes, the same frames, warm, and as many frames a batch. The peer's dataset opens its file
once a worker, without locks, and copies a frame out of the map, which `default_collate` stacks.
Run it as `PYTHONPATH=.:benchmarks python benchmarks/_stores_lmdb.py [--quick]`.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import lmdb
import numpy as np
import torch
from interleaved import take_turns
from torch.utils.data import DataLoader, Dataset

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.stores._base.packing import StreamRecord
from stream_dataloader.stores.lmdb import LmdbPacker, LmdbStore

LANES, TIME_STEPS, WORKERS = 8, 10, 2
SHAPE = (3, 120, 160)
STREAMS = 16


def _frames(stream: int, steps: int) -> Iterator[np.ndarray[Any, Any]]:
    """A picture that drifts, with some noise."""
    rng = np.random.default_rng(stream)
    wide = np.cumsum(rng.integers(-2, 3, (3, 120, 160 + steps)), axis=2) + 128
    for step in range(steps):
        yield (wide[..., step : step + 160] + rng.integers(0, 2, SHAPE)).clip(0, 255).astype(np.uint8)


def _pack(folder: str, steps: int, **options: Any) -> int:
    """Write a store; returns its bytes on disk."""
    os.makedirs(folder)
    packer = LmdbPacker(folder, **options)
    part = packer.part(0)
    records = []
    for stream in range(STREAMS):
        count, place = part.write(stream, str(stream), _frames(stream, steps))
        records.append(StreamRecord(stream, str(stream), count, place))
    part.close()
    packer.finish(records)
    return sum(entry.stat().st_size for entry in os.scandir(folder))


def _write_frames(path: str, steps: int) -> int:
    with lmdb.open(path, subdir=False, lock=False, map_size=1 << 33) as opened:
        for stream in range(STREAMS):
            with opened.begin(write=True) as transaction:
                for step, frame in enumerate(_frames(stream, steps)):
                    transaction.put((stream * steps + step).to_bytes(8, "big"), frame.tobytes(), append=True)
    return os.stat(path).st_size


class _FrameDataset(Dataset[torch.Tensor]):
    """A frame a sample, as LMDB datasets for torch mostly are."""

    def __init__(self, path: str, count: int) -> None:
        self._path, self._count = path, count
        self._transaction: Any = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._transaction is None:
            opened = lmdb.open(
                self._path,
                subdir=False,
                readonly=True,
                lock=False,
                readahead=False,
                map_size=os.stat(self._path).st_size,
            )
            self._transaction = opened.begin(buffers=True)
        value = self._transaction.get(index.to_bytes(8, "big"))
        return torch.from_numpy(np.frombuffer(value, np.uint8).reshape(SHAPE).copy())


def _seconds(loader: Iterable[Any], batches: int) -> float:
    """Of all batches but the first, for which workers are started."""
    begin = 0.0
    count = 0
    for _ in loader:
        count += 1
        if count == 1:
            begin = time.perf_counter()
    assert count == batches, (count, batches)
    return time.perf_counter() - begin


def _ours(store: LmdbStore, batches: int) -> float:
    dataset = StreamDataset(store.sources, store, batch_size=LANES, time_steps=TIME_STEPS, lengths=store.lengths)
    return _seconds(StreamDataLoader(dataset, num_workers=WORKERS), batches)


def _theirs(path: str, count: int, batches: int) -> float:
    loader = DataLoader(_FrameDataset(path, count), batch_size=LANES * TIME_STEPS, num_workers=WORKERS)
    return _seconds(loader, batches)


def rows(quick: bool) -> list[tuple[str, float, float | None, str]]:
    """Name, ratio of the peer's time to ours, target, and a note, for each way to keep windows."""
    steps, rounds = (100, 3) if quick else (200, 5)
    batches = STREAMS * steps // (LANES * TIME_STEPS)
    raw_bytes = STREAMS * steps * int(np.prod(SHAPE))
    peer = "torch DataLoader, a frame a sample"
    with tempfile.TemporaryDirectory() as folder:
        sizes = {peer: _write_frames(path := os.path.join(folder, "frames.lmdb"), steps)}
        kinds: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
            "raw windows": ({}, {}),
            "raw windows, check=False": ({}, {"check": False}),
            "zstd": ({"codec": "zstd"}, {}),
            "jpeg": ({"codec": "jpeg", "quality": 90}, {}),
        }
        contenders: dict[str, Callable[[], float]] = {peer: partial(_theirs, path, STREAMS * steps, batches)}
        written: dict[str, str] = {}
        for name, (options, reading) in kinds.items():
            if repr(options) not in written:
                written[repr(options)] = os.path.join(folder, name.replace(" ", "-"))
                sizes[name] = _pack(written[repr(options)], steps, **options)
            else:
                sizes[name] = sizes["raw windows"]
            contenders[name] = partial(_ours, LmdbStore(written[repr(options)], **reading), batches)
        seconds = take_turns(contenders, rounds)
    found: list[tuple[str, float, float | None, str]] = []
    for name in kinds:
        ratios = [theirs / ours for theirs, ours in zip(seconds[peer], seconds[name], strict=True)]
        speed = raw_bytes / statistics.median(seconds[name]) / 1e9
        note = (
            f"{sizes[name] / 1e6:.0f} MB on disk, the peer's {sizes[peer] / 1e6:.0f} MB, of {raw_bytes / 1e6:.0f} MB "
            f"of frames; {speed:.2f} GB/s; rounds {min(ratios):.1f} to {max(ratios):.1f}"
        )
        found.append(
            (f"LMDB, {name}, against {peer}", statistics.median(ratios), 4.0 if name == "raw windows" else None, note)
        )
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    for row in rows("--quick" in sys.argv):
        print(*row, sep=" | ")
