"""Cost of several ranks: padding, by the rule that deals sources to them, and agreeing on where the epoch ends.

- `padding`: the share of real items in all cells of all ranks' batches, simulated: the schedule alone, no process.
- `agreement`: four ranks on this machine, of which one has much more to read: what the start of an epoch costs, and a
  step of which the others have nothing, beyond what one of them takes for it alone.
- `store`: what a number of ranks ask of the store of torch.distributed at the start of an epoch and at a step of its
  tail, all at once, over loopback.

Run it as `python benchmarks/ranks.py [--quick] [--json PATH] [--only SECTION]`.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import live
import numpy as np
import torch.distributed as dist
from interleaved import Result, figure
from program import Section, run
from together import in_processes, in_threads
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader._engine.ranks.agreement import AgreedSteps
from stream_dataloader._engine.ranks.own_rank import RankInfo
from stream_dataloader._engine.ranks.rendezvous import Rendezvous
from stream_dataloader._engine.schedule.order import Order
from stream_dataloader._engine.schedule.place import Place
from stream_dataloader._engine.schedule.replay import steps_of_groups
from stream_dataloader._engine.schedule.rules import Groups, IntArray

LANES = 8  # of a rank
MOST_MS_A_STEP = 1.0
_TAIL_STEPS, _STEP_SECONDS = 50, 0.02  # what a step of training takes
_PATIENCE_SECONDS = 60

# padding --------------------------------------------------------------------------------------------------------------


def uniform(rng: np.random.Generator, count: int) -> IntArray:
    """10 to 100 steps, each as likely."""
    return rng.integers(10, 101, count)


def heavy_tailed(rng: np.random.Generator, count: int) -> IntArray:
    """A Pareto distribution from 10 to 500 steps, of which most are short and a few very long."""
    steps: IntArray = np.minimum(10 * (1 + rng.pareto(1.3, count)), 500).astype(np.int64)
    return steps


def split_to_lanes(lengths: IntArray, ranks: int, rng: np.random.Generator) -> float:
    """Each lane has a list of its own from the start."""
    order = rng.permutation(len(lengths))
    longest = max(int(lengths[order[lane :: ranks * LANES]].sum()) for lane in range(ranks * LANES))
    return float(lengths.sum() / (longest * ranks * LANES))


def dealt(
    lengths: IntArray, ranks: int, rng: np.random.Generator, groups: int, known: bool, schedule: str | None
) -> float:
    """Dealt to groups, each just in time; `groups` 0 stands for one a rank."""
    total = groups or ranks
    seed = int(rng.integers(1 << 30))
    options: dict[str, Any] = {"lengths": lengths, "schedule": schedule, "shuffle": schedule != "longest_first"}
    rules = StreamDataset(range(len(lengths)), iter, ranks * LANES, time_steps=1, seed=seed, **options)._rules
    rules = dataclasses.replace(rules, groups=Groups(total, 0, total))
    order = None if known else Order(rules, Place(0), None)
    steps = max(steps_of_groups(rules, 0, lengths, order))
    return float(lengths.sum() / (steps * ranks * LANES))


RULES: dict[str, Callable[[IntArray, int, np.random.Generator], float]] = {
    "lists split to lanes": split_to_lanes,
    "dealt to ranks, just in time in each": partial(dealt, groups=0, known=False, schedule=None),
    "the same, lengths known": partial(dealt, groups=0, known=True, schedule=None),
    "just in time over all ranks": partial(dealt, groups=1, known=False, schedule=None),
    'lengths known, "balanced"': partial(dealt, groups=0, known=True, schedule="balanced"),
    'lengths known, "longest_first"': partial(dealt, groups=0, known=True, schedule="longest_first"),
}


def measure_padding(quick: bool) -> Iterator[Result]:
    """The share of real items, for 1 to 64 ranks."""
    for name, lengths_of in (("10 to 100 steps", uniform), ("heavy-tailed", heavy_tailed)):
        for ranks in (1, 8) if quick else (1, 2, 4, 8, 16, 32, 64):
            count = 125 * ranks
            section = f"padding: {name}, {ranks} ranks of {LANES} lanes, {count} streams: share of real items"
            for rule, share_of in RULES.items():
                shares = []
                for seed in range(3 if quick else 10):
                    rng = np.random.default_rng(seed)
                    shares.append(share_of(lengths_of(rng, count), ranks, rng))
                yield figure(section, rule, shares, "of 1", at_most=False)


# agreement ------------------------------------------------------------------------------------------------------------


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def read_uneven(rank: int, world_size: int, port: int, steps: int) -> dict[str, list[float]]:
    """One rank; the last one has all of the tail. Returns milliseconds."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    lengths = [10] * (world_size - 1) + [steps]
    told: dict[str, list[float]] = {"begin": [], "idle": [], "busy": []}
    for _ in range(3):
        loader = StreamDataLoader(StreamDataset(lengths, range, 1, time_steps=1, seed=0), timeout=60)
        dist.barrier()
        start = time.perf_counter()
        iterator = iter(loader)
        told["begin"].append(1000 * (time.perf_counter() - start))
        for i, _ in enumerate(_slowly(iterator, told, busy=rank == world_size - 1)):
            if i >= 10:
                dist.barrier()  # in step, as in training
    dist.barrier()
    dist.destroy_process_group()
    return told


def _slowly(iterator: Iterator[Any], told: dict[str, list[float]], *, busy: bool) -> Iterator[Any]:
    """The batches; notes how long each took to come, once in the tail."""
    for step in range(1 << 30):
        start = time.perf_counter()
        batch = next(iterator, None)
        if batch is None:
            return
        if step > 20:
            told["busy" if busy else "idle"].append(1000 * (time.perf_counter() - start))
        yield batch


def measure_agreement(quick: bool) -> Iterator[Result]:
    """Measure a step of the tail, with all processes on this machine's cores."""
    for world_size in (2, 4):
        port, steps = free_port(), 200 if quick else 1000
        arguments = [(rank, world_size, port, steps) for rank in range(world_size)]
        told = in_processes(multiprocessing.get_context("spawn"), read_uneven, arguments)
        live.done(f"{world_size} ranks: all epochs read")
        section = f"agreement: {world_size} ranks, one of which has all of the tail"
        begins = [max(rank["begin"][i] for rank in told) for i in range(3)]
        yield figure(section, "start of an epoch", begins, "ms")
        for kind, name in (("busy", "a step of the tail, on the rank with data"), ("idle", "on those without")):
            values = [value for rank in told for value in rank[kind]]
            low, high = np.percentile(values, [5, 95])
            limit = MOST_MS_A_STEP
            yield Result(section, name, statistics.median(values), "ms", (float(low), float(high)), limit)


# store ----------------------------------------------------------------------------------------------------------------


def session_of(rank: int, ranks: int, store: TCPStore, name: str) -> Rendezvous:
    """A rank's meeting with the others; one rank keeps the store, as among processes."""
    with mock.patch.object(dist, "get_rank", return_value=rank):
        return Rendezvous(RankInfo(rank, ranks, name), store, _PATIENCE_SECONDS)


def in_step(session: Rendezvous, barrier: threading.Barrier) -> tuple[float, float]:
    """One rank, of which the first has data for longest: seconds of the start, and of a step of the tail."""
    barrier.wait()
    start = time.perf_counter()
    session.begin({"seed": 0, "deterministic": True, "options": "x" * 300})
    begun = time.perf_counter() - start
    agreed = AgreedSteps(session, every=False, step=0)
    barrier.wait()
    start, step, busy = time.perf_counter(), 0, session.own.rank == 0
    while agreed.delivers(step, busy and step < _TAIL_STEPS):
        step += 1
        if busy:
            time.sleep(_STEP_SECONDS)
    tail = (time.perf_counter() - start) / _TAIL_STEPS - _STEP_SECONDS
    assert step == _TAIL_STEPS, f"rank {session.own.rank} ended at step {step}"
    barrier.wait()
    agreed.close()
    return begun, tail


def measure_store(quick: bool) -> Iterator[Result]:
    """Ranks as threads of this process, which ask one store."""
    store = TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    for ranks in (8,) if quick else (8, 64, 512):
        begins: list[float] = []
        steps: list[float] = []
        for turn in range(3):
            barrier = threading.Barrier(ranks)
            sessions = [session_of(rank, ranks, store, f"{ranks}/{turn}") for rank in range(ranks)]
            begun, tail = zip(*in_threads([partial(in_step, one, barrier) for one in sessions], barrier), strict=True)
            begins.append(1000 * max(begun))
            steps.append(1000 * max(tail))
            live.done(f"round {turn + 1} of 3: {ranks} ranks")
        section = f"store: {ranks} ranks as threads of one process"
        yield figure(section, "start of an epoch, until the last has begun", begins, "ms")
        yield figure(section, "a step of the tail, beyond the step itself", steps, "ms")


SECTIONS: dict[str, Section] = {"padding": measure_padding, "agreement": measure_agreement, "store": measure_store}


if __name__ == "__main__":
    run(__doc__, SECTIONS)
