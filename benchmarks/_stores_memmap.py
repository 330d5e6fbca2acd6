"""The memory-mapped store against a plain copy, and against tensordict's memory-mapped way.

- A plain copy: two processes copy the same windows out of the same map, by NumPy. They write to as many batches in turn
  as the loader has under way, since a batch that was handed over cannot be written to again; or to one over and over,
  which stays in the processor's cache, as no loader's batches can.
- tensordict's way, as its tutorials have it: `td[indices]` of a memory-mapped TensorDict is a batch, gathered in a
  worker of torch's `DataLoader` (`__getitems__`, and a `collate_fn` that returns what it is given), or a frame a
  sample and torch's default collate.

Guarantees: the file's pages are in memory, and workers run, before time counts; contenders take turns, see
`interleaved`; everybody reads the same frames in the same order.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from interleaved import Row
from store_rows import bytes_of, in_turns, row_of, without
from together import in_processes
from torch.utils.data import DataLoader, Dataset

from stream_dataloader import StreamDataLoader, StreamDataset, stores
from stream_dataloader.stores._base.packing import StreamRecord
from stream_dataloader.stores.memmap import MemmapPacker

STREAMS, STEPS, LANES, TIME_STEPS, WORKERS = 16, 60, 8, 10, 2
FRAME = (3, 240, 360)

#: Batches that are under way in the loader: two a worker, one that is made, and one that the consumer holds.
UNDER_WAY = 6
LEAST_BATCHES = 20


def write_store(folder: str) -> None:
    """Streams of frames of noise."""
    block = np.random.default_rng(0).integers(0, 256, (STEPS, *FRAME), np.uint8)
    packer = MemmapPacker(folder)
    part = packer.part(0)
    records = []
    for number in range(STREAMS):
        steps, place = part.write(number, str(number), iter(block ^ np.uint8(number)))
        records.append(StreamRecord(number, str(number), steps, place))
    part.close()
    packer.finish(records)


def rate(batches: Iterator[Any], seconds: float) -> float:
    """Batches a second, once it is warm."""
    for _ in range(LEAST_BATCHES):
        next(batches)
    begun, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - begun) < seconds or count < LEAST_BATCHES:
        next(batches)
        count += 1
    return count / elapsed


def ours(path: str, seconds: float) -> float:
    """This package's loader."""
    sources, store = stores.open(path)
    dataset = StreamDataset(sources, store, LANES, "cycle", time_steps=TIME_STEPS, lengths=store.lengths)
    return rate(iter(StreamDataLoader(dataset, WORKERS)), seconds)


def windows() -> Iterator[list[int]]:
    """The first frame of each lane's window, batch after batch, as they lie in the file."""
    while True:
        for first in range(0, STREAMS, LANES):
            for start in range(0, STEPS, TIME_STEPS):
                yield [(first + lane) * STEPS + start for lane in range(LANES)]


def copies(path: str, worker: int, turns: int) -> Iterator[None]:
    """Copies half of the lanes of each batch."""
    rows = stores.open(path).open_stream.index.files[0].rows
    batches = np.zeros((turns, TIME_STEPS, LANES // WORKERS, *FRAME), np.uint8)
    for number, starts in enumerate(windows()):
        batch = batches[number % turns]
        for lane, start in enumerate(starts[worker::WORKERS]):
            batch[:, lane] = rows[start : start + TIME_STEPS]
        yield


def copier(path: str, worker: int, turns: int, seconds: float, barrier: Any) -> float:
    """One of the copying processes."""
    batches = copies(path, worker, turns)
    for _ in range(LEAST_BATCHES):
        next(batches)
    barrier.wait()
    return rate(batches, seconds)


def plain(path: str, seconds: float, *, turns: int) -> float:
    """Two processes that copy."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(WORKERS)
    rates: list[float] = in_processes(
        context, copier, [(path, worker, turns, seconds, barrier) for worker in range(WORKERS)]
    )
    return statistics.mean(rates)


class Frames(Dataset[Any]):
    """A memory-mapped TensorDict; an index is a frame, several are a batch."""

    def __init__(self, path: str) -> None:
        from tensordict import TensorDict

        self._frames = TensorDict.load_memmap(path)

    def __len__(self) -> int:
        return len(self._frames)

    def __getitem__(self, index: int) -> Any:
        return self._frames[index]["image"]

    def __getitems__(self, indices: list[int]) -> Any:
        return self._frames[indices]


class FramesOneByOne(Frames):
    """The same, a frame at a time, stacked by torch's default collate."""

    __getitems__ = None  # type: ignore[assignment]


def batches_of_indices() -> Iterator[list[int]]:
    """The frames of each batch, lane after lane."""
    for starts in windows():
        yield [start + step for step in range(TIME_STEPS) for start in starts]


def same(batch: Any) -> Any:
    """The `collate_fn` of the tutorial."""
    return batch


def tensordicts(path: str, seconds: float, *, gathered: bool) -> float:
    """A TensorDict under torch's `DataLoader`."""
    frames = Frames(path) if gathered else FramesOneByOne(path)
    sampler: Any = batches_of_indices()
    loader = DataLoader(frames, batch_sampler=sampler, num_workers=WORKERS, collate_fn=same if gathered else None)
    return rate(iter(loader), seconds)


def rows(quick: bool) -> Iterator[Row]:
    """A row for each contender; targets are what is to be reached at least."""
    seconds = 0.2 if quick else 1.5
    with tempfile.TemporaryDirectory() as folder:
        path, peer_path = os.path.join(folder, "ours"), os.path.join(folder, "tensordict")
        os.mkdir(path)
        write_store(path)
        frames = stores.open(path).open_stream.index.files[0].rows
        runs: dict[str, Callable[[], float]] = {
            "ours": partial(ours, path, seconds),
            "plain copies to batches in turn": partial(plain, path, seconds, turns=UNDER_WAY),
            "plain copies to one batch": partial(plain, path, seconds, turns=1),
        }
        if missing := without("tensordict", "memory-mapped store, against tensordict"):
            yield missing
        else:
            from tensordict import TensorDict

            TensorDict({"image": torch.from_numpy(frames.copy())}, [len(frames)]).memmap(peer_path)
            runs["tensordict, td[indices]"] = partial(tensordicts, peer_path, seconds, gathered=True)
            runs["tensordict, default collate"] = partial(tensordicts, peer_path, seconds, gathered=False)
        rates = in_turns(runs, "memory-mapped store", quick)
        disk = bytes_of(path)
    for peer in list(runs)[1:]:
        target = 2.0 if "tensordict" in peer else 0.9
        note = f"{statistics.median(rates['ours']):,.0f} batches/s of {(TIME_STEPS, LANES, *FRAME)} uint8"
        yield row_of(f"memory-mapped store, against {peer}", rates, "ours", peer, target, disk, note)
