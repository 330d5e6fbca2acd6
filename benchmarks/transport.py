"""Speed, cost and memory of batches on their way from two worker processes to the main process.

- `throughput`: batches a second, or bytes, of streams that have their windows ready, against pytorch-stream-dataloader,
  torch's own `DataLoader` and a plain `copy_` of one thread.
- `main`: time in the main process for a batch that is ready: its consumer sleeps between batches.
- `memory`: what main process and workers take more than torch's own `DataLoader`, and whether it grows.
- `--figure`: throughput against the size of the batch, drawn.

Guarantees: start-up is not counted; contenders get the same windows and take turns, see `interleaved`. A stream
yields one array over and over. For pytorch-stream-dataloader each window is a new tensor over that array, as windows
that are decoded or computed are new. Given one tensor over and over, or parts of one, torch moves it to shared memory
once and then sends handles, so that workers copy nothing; that is measured too, for information. torch computes with
one thread: with more, pytorch-stream-dataloader is slower where its workers need the two cores. Run it as
`python benchmarks/transport.py [--quick] [--json PATH] [--only SECTION | --figure PATH]`.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytorch_stream_dataloader.stream_dataloader as peer_loader
import pytorch_stream_dataloader.stream_dataset as peer_dataset
import torch
from interleaved import Result, draw, figure, ratio, run_in_turns, take_turns
from program import Section, measure, parser_of
from torch.utils.data import DataLoader, IterableDataset

from stream_dataloader import StreamDataLoader, StreamDataset

LANES, WORKERS, PREFETCH = 8, 2, 2
SOURCES = [10**9] * LANES  # windows of each stream: more than anybody reads
MB, GB = 1e6, 1e9

OURS, QUEUE, COPY = "stream_dataloader", "stream_dataloader, messages only", "copy_, 1 thread"
PEER, TORCH = "pytorch-stream-dataloader 1.0", "torch DataLoader, whole batches"
RESENT = f"{PEER}, one tensor sent again"

Window = np.ndarray[Any, Any]


class Work(NamedTuple):
    """Shape of the lanes' windows, and the targets for them.

    Attributes:
        of_peer: Least throughput in units of pytorch-stream-dataloader's.
        of_torch: The same for torch's `DataLoader`.
        of_copy: The same for `copy_`; None: not asked for.
    """

    shape: tuple[int, ...]
    dtype: type
    of_peer: float
    of_torch: float
    of_copy: float | None = None

    def __str__(self) -> str:
        return f"{self.shape} {np.dtype(self.dtype).name}"

    def window(self) -> Window:
        """A window that is ready."""
        return np.ones(self.shape, self.dtype)


BIG = Work((10, 3, 240, 360), np.uint8, 4.5, 8.0, 0.85)
MID = Work((16, 128), np.float32, 10.0, 3.0)
SMALL = Work((1, 64), np.uint8, 10.0, 3.0)

# contenders -----------------------------------------------------------------------------------------------------------


class WholeBatches(IterableDataset[torch.Tensor]):
    """Stacks whole batches in torch's workers."""

    def __init__(self, window: Window) -> None:
        self._windows = [torch.from_numpy(window)] * LANES

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.stack(self._windows, 1)


def stack_all(windows: Iterable[torch.Tensor]) -> torch.Tensor:
    """Puts lanes side by side, for the peer, which passes an iterator."""
    return torch.stack(list(windows), 1)


def new_tensors(window: Window, count: int) -> Iterator[torch.Tensor]:
    """A stream whose every window is a tensor of its own."""
    return map(torch.from_numpy, itertools.repeat(window, count))


def ours(window: Window, **options: Any) -> StreamDataLoader:
    """This package's loader."""
    dataset = StreamDataset(SOURCES, partial(itertools.repeat, window), LANES, seed=0, windows="given")
    return StreamDataLoader(dataset, WORKERS, prefetch_factor=PREFETCH, **options)


def without_slots(window: Window) -> StreamDataLoader:
    """This package's loader, as it is where the system has no shared memory."""
    loader = ours(window)
    starter = loader._starter
    starter.renew(replace(starter._work.settings, uses_slots=False))
    return loader


def peer(window: Window, *, resent: bool = False) -> Iterable[Any]:
    """pytorch-stream-dataloader 1.0, whose prefetch factor is torch's default, 2."""
    tensor = torch.from_numpy(window.copy())
    streams = partial(itertools.repeat, tensor) if resent else partial(new_tensors, window)
    dataset = peer_dataset.StreamDataset(list(SOURCES), streams, LANES, "zeros", torch.zeros_like(tensor))
    batches: Iterable[Any] = peer_loader.StreamDataLoader(dataset, WORKERS, stack_all)
    return batches


def torch_itself(window: Window) -> Iterable[Any]:
    """Torch's own `DataLoader`."""
    return DataLoader(WholeBatches(window), batch_size=None, num_workers=WORKERS, prefetch_factor=PREFETCH)


def copies(window: Window) -> Iterator[torch.Tensor]:
    """Copies a batch from one warm buffer to another."""
    source, target = torch.ones(2, window.nbytes * LANES, dtype=torch.uint8)
    while True:
        yield target.copy_(source)


Contender = Callable[[Window], Iterable[Any]]
CONTENDERS: dict[str, Contender] = {OURS: ours, PEER: peer, TORCH: torch_itself, QUEUE: without_slots}

# throughput -----------------------------------------------------------------------------------------------------------

LEAST_BATCHES = 20


def rate(batches: Iterator[Any], seconds: float) -> float:
    """Batches a second, over about so many seconds."""
    start = time.perf_counter()
    for count, _ in enumerate(batches, 1):
        elapsed = time.perf_counter() - start
        if elapsed >= seconds and count >= LEAST_BATCHES:
            return count / elapsed
    raise AssertionError("the streams do not end")


def bytes_per_second(contender: Contender, window: Window, seconds: float) -> float:
    """Once it is warm: the workers run, and shared memory was used before."""
    batches = iter(contender(window))
    rate(batches, seconds / 3)
    return rate(batches, seconds) * window.nbytes * LANES


def measure_throughput(quick: bool) -> Iterator[Result]:
    """Bytes or batches a second of all contenders, and in units of theirs."""
    for work in (BIG, MID, SMALL):
        window = work.window()
        section = f"throughput: 2 workers, 8 lanes of {work} windows, {window.nbytes * LANES / MB:,.4g} MB a batch"
        runs = {
            name: partial(bytes_per_second, contender, window, 0.2 if quick else 1.2)
            for name, contender in (CONTENDERS | {RESENT: partial(peer, resent=True), COPY: copies}).items()
        }
        rounds = take_turns(runs, 3 if quick else 5, str(work), warm_up=not quick)
        unit, size = ("GB/s", GB) if work is BIG else ("1/s", window.nbytes * LANES)
        yield from (figure(section, name, [value / size for value in rounds[name]], unit) for name in runs)
        targets = {PEER: work.of_peer, TORCH: work.of_torch, COPY: work.of_copy, RESENT: None, QUEUE: None}
        if work is not BIG:  # copying is not what takes the time
            del targets[COPY]
        for name, target in targets.items():
            yield ratio(section, f"ours / {name}", rounds, OURS, name, target, at_most=False)


# main process ---------------------------------------------------------------------------------------------------------

PAUSE_SECONDS = 5e-3
MOST_MICROSECONDS = 200.0


class Cost(NamedTuple):
    """Microseconds that `next` takes in the main thread."""

    median_cpu: float
    mean_cpu: float
    median_wall: float
    mean_wall: float


def ready_cost(contender: Contender, window: Window, batches: int) -> Cost:
    """Cost of batches that are ready: the consumer sleeps, longer if workers need it."""
    iterator = iter(contender(window))
    pause = max(PAUSE_SECONDS, 2 / rate(iterator, 0.3))
    cpu, wall = [], []
    for _ in range(batches):
        time.sleep(pause)
        begun, begun_cpu = time.perf_counter(), time.thread_time()
        _batch = next(iterator)  # held until the next one is there, as in a loop
        cpu.append(1e6 * (time.thread_time() - begun_cpu))
        wall.append(1e6 * (time.perf_counter() - begun))
    return Cost(statistics.median(cpu), statistics.mean(cpu), statistics.median(wall), statistics.mean(wall))


def measure_main_process(quick: bool) -> Iterator[Result]:
    """Microseconds that a ready batch takes in the main process."""
    for work in (BIG, MID, SMALL):
        section = f"main process, microseconds for a ready batch: 2 workers, 8 lanes of {work} windows"
        window, batches = work.window(), 20 if quick else 150
        runs = {name: partial(ready_cost, contender, window, batches) for name, contender in CONTENDERS.items()}
        rounds = run_in_turns(runs, 1 if quick else 5, str(work), warm_up=not quick)
        for name, costs in rounds.items():
            for i, field in enumerate(Cost._fields):
                what = f"{name}: {field.replace('_', ', ')}"
                target = MOST_MICROSECONDS if name == OURS else None
                yield figure(section, what, [cost[i] for cost in costs], "us", target)


# memory ---------------------------------------------------------------------------------------------------------------

WORKER_BYTES = 20 * MB
FEW, MANY = 1_000, 10_000


class Resident(NamedTuple):
    """Bytes of main process and workers, and of the ring among them.

    Attributes:
        after: Of all processes, memory that they share counted once, after so many batches.
        slots: Slots of the ring.
        slot_bytes: Size of one.
        touched_bytes: What of the ring is in memory.
    """

    after: list[float]
    slots: int = 0
    slot_bytes: int = 0
    touched_bytes: int = 0


def proportional_bytes(pid: int) -> int:
    """Return the bytes of a process, with its share of shared memory; without files, whose share depends on others."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def resident(contender: Contender, work: Work, counts: Sequence[int], pause: float) -> Resident:
    """Memory after so many batches, in this process."""
    torch.set_num_threads(1)
    loader, after, done = contender(work.window()), [], 0
    batches = iter(loader)
    for count in counts:
        for _batch in itertools.islice(batches, count - done):  # one is held
            time.sleep(pause)
        done = count
        processes = [os.getpid(), *(child.pid or 0 for child in multiprocessing.active_children())]
        after.append(float(sum(map(proportional_bytes, processes))))
    if not isinstance(loader, StreamDataLoader):
        return Resident(after)
    leases = loader._starter.pool.leases  # type: ignore[union-attr]
    assert leases is not None
    pool = leases.pool
    assert pool.geometry is not None
    return Resident(after, pool.slots, pool.geometry.slot_bytes, 512 * os.fstat(pool._file._fd).st_blocks)


def resident_afresh(contender: Contender, work: Work, counts: Sequence[int], pause: float = 0) -> Resident:
    """The same in a process that did nothing before."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        return executor.submit(resident, contender, work, counts, pause).result()


def measure_memory(quick: bool) -> list[Result]:
    """Megabytes."""
    runs = {
        "torch": partial(resident_afresh, torch_itself, SMALL, [FEW]),
        "big": partial(resident_afresh, ours, BIG, [60 if quick else 400], PAUSE_SECONDS),
        "mid": partial(resident_afresh, ours, MID, [FEW, MANY]),
    }
    rounds = run_in_turns(runs, 1 if quick else 5, "resident memory", warm_up=False)
    first = rounds["big"][0]
    whole, touched = first.slots * first.slot_bytes, [big.touched_bytes for big in rounds["big"]]
    over = [big.after[0] - small.after[0] for big, small in zip(rounds["big"], rounds["torch"], strict=True)]
    beyond = [(total - ring) / WORKERS for total, ring in zip(over, touched, strict=True)]
    few, many = zip(*(mid.after for mid in rounds["mid"]), strict=True)
    growth = [later - earlier for earlier, later in zip(few, many, strict=True)]
    most_growth = max(1 * MB, 0.02 * statistics.median(few))

    def line(work: Work, name: str, values: Sequence[float], target: float | None = None) -> Result:
        section = f"memory (PSS less files) of main process and workers: 2 workers, 8 lanes of {work} windows"
        return figure(section, name, [value / MB for value in values], "MB", target and target / MB)

    return [
        line(BIG, f"ring: if all its {first.slots} slots were written to", [whole]),
        line(BIG, "ring: resident", touched),
        line(BIG, "over torch DataLoader's with tiny items", over, whole + WORKERS * WORKER_BYTES),
        line(BIG, "the same less the ring, a worker", beyond, WORKER_BYTES),
        line(MID, f"after {FEW:,} batches", few),
        line(MID, f"after {MANY:,} batches", many),
        line(MID, "growth", growth, most_growth),
    ]


# figure ---------------------------------------------------------------------------------------------------------------

TITLE = "From 2 worker processes to the main process: 8 lanes of ready windows, 2 cores"
BATCH_BYTES = [1024 * 4**i for i in range(9)]
STYLES = {COPY: "k--", OURS: "C0o-", QUEUE: "C0o:", TORCH: "C1s-", PEER: "C2^-"}


def measure_sizes(quick: bool) -> dict[str, list[Result]]:
    """Throughput against the size of a batch, of each contender."""
    lines: dict[str, list[Result]] = {name: [] for name in STYLES}
    for size in BATCH_BYTES:
        window = np.ones((4, size // LANES // 4), np.uint8)
        runs = {
            name: partial(bytes_per_second, contender, window, 0.2 if quick else 1.0)
            for name, contender in (CONTENDERS | {COPY: copies}).items()
        }
        for name, values in take_turns(runs, 1 if quick else 3, f"batches of {size >> 10:,} KiB").items():
            section = f"throughput of batches of {size // 1024:,} KiB"
            lines[name].append(figure(section, name, [value / GB for value in values], "GB/s"))
    return lines


SECTIONS: dict[str, Section] = {
    "throughput": measure_throughput,
    "main": measure_main_process,
    "memory": measure_memory,
}


def main() -> None:
    """Measure, or draw."""
    parser = parser_of(__doc__, SECTIONS)
    parser.add_argument(
        "--figure", type=Path, metavar="PATH", help="instead, draw throughput against the size of a batch"
    )
    options = parser.parse_args()
    multiprocessing.set_start_method("fork")  # the peer's loader cannot be pickled
    torch.set_num_threads(1)
    if not options.figure:
        measure(SECTIONS, options)
        return
    lines: dict[str, list[Result]] = {}

    def sizes(quick: bool) -> Iterator[Result]:
        lines.update(measure_sizes(quick))
        yield from (result for of_size in zip(*lines.values(), strict=True) for result in of_size)

    options.only = None
    measure({"figure": sizes}, options)
    styled = {name: (STYLES[name], results) for name, results in lines.items()}
    draw(options.figure, TITLE, "GB/s", BATCH_BYTES, styled)


if __name__ == "__main__":
    main()
