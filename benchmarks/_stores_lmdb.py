"""LMDB of raw windows against torch's `DataLoader` over an LMDB that has a frame a value.

Both have two worker processes, the same frames, warm, and as many frames a batch. The peer's dataset opens its file
once a worker, without locks, and copies a frame out of the map, which `default_collate` stacks.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lmdb
import numpy as np
import torch
from interleaved import Result
from store_rows import bytes_of, in_turns, rate_of, row_of
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
    return bytes_of(folder)


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


def _ours(store: LmdbStore) -> float:
    dataset = StreamDataset(store.sources, store, batch_size=LANES, time_steps=TIME_STEPS, lengths=store.lengths)
    return rate_of(StreamDataLoader(dataset, num_workers=WORKERS), lambda batch: int(batch.mask.sum()))


def _theirs(path: str, count: int) -> float:
    return rate_of(DataLoader(_FrameDataset(path, count), batch_size=LANES * TIME_STEPS, num_workers=WORKERS), len)


#: Ways to keep windows, and to read them: options of packing, and of the store.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "raw windows": ({}, {}),
    "raw windows, check=False": ({}, {"check": False}),
    "zstd": ({"codec": "zstd"}, {}),
    "jpeg": ({"codec": "jpeg", "quality": 90}, {}),
}


def rows(quick: bool) -> Iterator[Result]:
    """A row for each way to keep windows."""
    steps = 120 if quick else 200
    raw_bytes = STREAMS * steps * int(np.prod(SHAPE))
    peer = "torch DataLoader, a frame a sample"
    with tempfile.TemporaryDirectory() as folder:
        peer_bytes = _write_frames(path := os.path.join(folder, "frames.lmdb"), steps)
        contenders: dict[str, Callable[[], float]] = {peer: partial(_theirs, path, STREAMS * steps)}
        sizes: dict[str, int] = {}
        for name, (options, reading) in KINDS.items():
            packed = os.path.join(folder, options.get("codec", "none"))
            if packed not in sizes:
                sizes[packed] = _pack(packed, steps, **options)
            sizes[name] = sizes[packed]
            contenders[name] = partial(_ours, LmdbStore(packed, **reading))
        rates = in_turns(contenders, "LMDB", quick)
    for name in KINDS:
        speed = statistics.median(rates[name]) * int(np.prod(SHAPE)) / 1e9
        note = f"the peer's {peer_bytes / 1e6:.0f} MB, of {raw_bytes / 1e6:.0f} MB of frames; {speed:.2f} GB/s"
        target = 4.0 if name == "raw windows" else None
        yield row_of(f"LMDB, {name}, against {peer}", rates, name, peer, target, sizes[name], note)
