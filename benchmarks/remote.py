"""Workers that are Ray tasks against worker processes, on four nodes of this machine, without a network between them.

- `scaling`: batches a second of streams that only wait, 5 ms an item, with 1 to 16 workers on Ray or processes.
- `cost`: batches a second of streams that cost nothing, and the time of the trainer's processor for each batch, with
  two workers and batches of 64 kB, 2 MB and 20 MB.
- `ledger`: batches a second of many short streams, with and without lengths.

Contenders take turns, see `interleaved`. An epoch is read before the clock starts, so that workers have started. Run it
as `python benchmarks/remote.py [--quick] [--json PATH] [--only SECTION]`; needs the extra `ray`.
"""

from __future__ import annotations

import atexit
import functools
import logging
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import ray
from interleaved import Result, figure, ratio, run_in_turns
from program import run
from ray.cluster_utils import Cluster

from stream_dataloader import StreamDataLoader, StreamDataset

LANES, NODES = 16, 4
OPTIONS: dict[str, dict[str, Any]] = {
    "ray": {"worker_method": "ray", "ray_remote_args": {"num_cpus": 1, "scheduling_strategy": "SPREAD"}},
    "processes": {},
}
Array = np.ndarray[Any, Any]


@functools.cache
def start_cluster() -> None:
    """Start the nodes, once."""
    node: dict[str, Any] = {"num_cpus": 16, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    for _ in range(NODES - 1):
        cluster.add_node(**node)
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    atexit.register(cluster.shutdown)
    atexit.register(ray.shutdown)


def waits(length: int) -> Iterator[Array]:
    """A stream that takes 5 ms for an item, as a decoder on another core would."""
    for i in range(length):
        time.sleep(5e-3)
        yield np.full(16, i, np.float32)


class Frames:
    """Streams of items of a given size, which cost nothing."""

    def __init__(self, numbers: int) -> None:
        self.item = np.zeros(numbers, np.float32)

    def __call__(self, length: int) -> Iterator[Array]:
        for _ in range(length):
            yield self.item


def kept(dataset: StreamDataset, workers: int, kind: str) -> StreamDataLoader[Any]:
    """A loader whose workers have started."""
    start_cluster()
    loader = StreamDataLoader(dataset, workers, persistent_workers=True, **OPTIONS[kind])
    for _ in loader:
        pass
    return loader


def epoch_of(loader: StreamDataLoader[Any]) -> dict[str, float]:
    """Batches a second, and the time of this process's processor for each batch of an epoch."""
    begin, busy = time.perf_counter(), time.process_time()
    batches = sum(1 for _ in loader)
    seconds, busy = time.perf_counter() - begin, time.process_time() - busy
    return {"batches/s": batches / seconds, "ms/batch": 1000 * busy / batches}


def compare(section: str, loaders: dict[str, StreamDataLoader[Any]], units: list[str], quick: bool) -> list[Result]:
    """Let loaders take turns; their workers end afterwards."""
    runs = {name: partial(epoch_of, loader) for name, loader in loaders.items()}
    found = run_in_turns(runs, 1 if quick else 3, section, warm_up=False)  # `kept` has read an epoch
    for loader in loaders.values():
        loader._stop_workers()
    return [
        figure(section, name, [epoch[unit] for epoch in epochs], unit)
        for unit in units
        for name, epochs in found.items()
    ]


def scaling(quick: bool) -> Iterator[Result]:
    """Throughput by the number of workers."""
    lengths = [16] * (LANES * (1 if quick else 2))
    for workers in (1, 4) if quick else (1, 2, 4, 8, 16):
        dataset = StreamDataset(lengths, waits, LANES, time_steps=4, lengths=lengths)
        loaders = {kind: kept(dataset, workers, kind) for kind in OPTIONS}
        yield from compare(f"scaling: {workers} workers, 5 ms an item", loaders, ["batches/s"], quick)


def cost(quick: bool) -> Iterator[Result]:
    """Throughput and the trainer's time by the size of batches."""
    for size, batches in (("64 kB", 2000), ("2 MB", 200), ("20 MB", 40))[: 2 if quick else 3]:
        numbers = {"64 kB": 500, "2 MB": 16_000, "20 MB": 160_000}[size]
        lengths = [batches * (1 if quick else 4) // 2] * 8
        dataset = StreamDataset(lengths, Frames(numbers), 8, time_steps=4, lengths=lengths)
        loaders = {kind: kept(dataset, 2, kind) for kind in OPTIONS}
        yield from compare(f"cost: batches of {size}", loaders, ["batches/s", "ms/batch"], quick)


def ledger(quick: bool) -> Iterator[Result]:
    """Throughput of short streams, whose draws are computed or decided by the loader."""
    lengths = [1 + i % 8 for i in range(400 if quick else 1600)]
    loaders = {
        f"lengths {known}": kept(
            StreamDataset(lengths, Frames(16), 8, time_steps=4, lengths=lengths if known else None), 2, "ray"
        )
        for known in (True, False)
    }
    runs = {name: partial(epoch_of, loader) for name, loader in loaders.items()}
    found = run_in_turns(runs, 2 if quick else 5, "ledger", warm_up=False)
    figures = {name: [epoch["batches/s"] for epoch in epochs] for name, epochs in found.items()}
    section = f"ledger: {len(lengths)} streams of 1 to 8 items, 2 workers on Ray"
    for name, values in figures.items():
        yield figure(section, name, values, "batches/s")
    yield ratio(section, "without / with lengths", figures, "lengths False", "lengths True")
    for loader in loaders.values():
        loader._stop_workers()


if __name__ == "__main__":
    run(__doc__, {"scaling": scaling, "cost": cost, "ledger": ledger})
