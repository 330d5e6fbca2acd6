"""Cost of scheduling and regrouping: without workers, for determinism, and in the main process.

- `overhead`: batches a second with `num_workers=0` and streams that cost nothing, against pytorch-stream-dataloader.
- `determinism`: time of an epoch of jittery streams, sources assigned in logical time against first come, first served.
- `main process`: time that `next` takes for a batch whose parts are there already, against what torch's own
  `DataLoader` takes to hand over as many objects of that size.
- `live`: batches a second and the share of cells without an item, where one of two cameras is slow (made up, 30
  and 5 pictures a second), and where one of eight streams of a server on this machine is.

All contenders of a section read the same streams and take turns; see `interleaved`. Run it as
`python benchmarks/scheduling.py [--quick] [--json PATH] [--only SECTION]`.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import numpy as np
import pytorch_stream_dataloader.stream_dataloader as peer_loader
import pytorch_stream_dataloader.stream_dataset as peer_dataset
import torch
from interleaved import Result, figure, ratio, run_in_turns, take_turns
from program import Section, run
from torch.utils.data import DataLoader, IterableDataset

from stream_dataloader import StreamDataLoader, StreamDataset, streams
from stream_dataloader.protocols import StreamFactory

LANES = 8

# overhead -------------------------------------------------------------------------------------------------------------

WINDOW = torch.zeros(16, 128)
LEAST_OF_PEER = 0.3
LEAST_OF_PEER_BATCH = 10_000 / 55_000  # 10,000 batches a second where the peer does 55,000


def ready_windows(count: int) -> Iterable[torch.Tensor]:
    """A stream that costs nothing."""
    return itertools.repeat(WINDOW, count)


def stack_all(windows: Iterable[torch.Tensor]) -> torch.Tensor:
    """Stack tensors, for the peer, which passes an iterator."""
    return torch.stack(list(windows))


def batches_per_second(loader: Iterable[Any]) -> float:
    """Read one epoch."""
    start = time.perf_counter()
    count = sum(1 for _ in loader)
    return count / (time.perf_counter() - start)


def measure_overhead(quick: bool) -> list[Result]:
    """Batches a second without workers, against the peer's."""
    section = "overhead: num_workers=0, 8 lanes of ready (16, 128) float32 windows"
    sources = [1000 if quick else 4000] * LANES

    def ours(**options: Any) -> float:
        dataset = StreamDataset(sources, ready_windows, LANES, seed=0, windows="given")
        return batches_per_second(StreamDataLoader(dataset, 0, **options))

    def peer() -> float:
        dataset = peer_dataset.StreamDataset(list(sources), ready_windows, LANES, "zeros", torch.zeros_like(WINDOW))
        return batches_per_second(peer_loader.StreamDataLoader(dataset, 0, stack_all))

    stacked = partial(ours, collate_fn=torch.stack)
    rounds = take_turns({"peer": peer, "stacked": stacked, "batch": ours}, 5 if quick else 15)
    return [
        figure(section, "pytorch-stream-dataloader 1.0", rounds["peer"], "1/s"),
        figure(section, "ours, collate_fn=torch.stack", rounds["stacked"], "1/s"),
        figure(section, "ours, StreamBatch", rounds["batch"], "1/s"),
        ratio(section, "ours, collate_fn=torch.stack / peer", rounds, "stacked", "peer", LEAST_OF_PEER, False),
        ratio(section, "ours, StreamBatch / peer", rounds, "batch", "peer", LEAST_OF_PEER_BATCH, False),
    ]


# determinism ----------------------------------------------------------------------------------------------------------


class Jittery(NamedTuple):
    """A source: what its stream does, and how long it takes, follow from the seed.

    Attributes:
        shortest: Least number of items.
        longest: Largest number of items.
    """

    seed: int
    shortest: int
    longest: int


def open_jittery(source: Jittery) -> Iterator[np.ndarray[Any, Any]]:
    """Takes 5 to 20 ms to open, and 0.2 to 1 ms an item."""
    rng = np.random.default_rng(source.seed)
    count = int(rng.integers(source.shortest, source.longest + 1))
    waits = rng.uniform(0.2e-3, 1e-3, count).tolist()
    item = np.zeros(2, np.uint8)
    time.sleep(rng.uniform(5e-3, 20e-3))
    for wait in waits:
        time.sleep(wait)
        yield item


def epoch_seconds(
    sources: Sequence[Jittery], prefetch_factor: int, deterministic: bool, lookahead: int, early: bool = True
) -> float:
    """Time of one epoch of jittery streams with 4 workers and an idle consumer."""

    def factory(source: Jittery) -> Iterator[np.ndarray[Any, Any]]:
        return open_jittery(source)

    factory.open_early = early  # type: ignore[attr-defined]
    options: dict[str, Any] = {"deterministic": deterministic, "lookahead": lookahead}
    dataset = StreamDataset(sources, factory, LANES, seed=0, time_steps=4, **options)
    loader = StreamDataLoader(dataset, num_workers=4, prefetch_factor=prefetch_factor)
    start = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - start


def measure_determinism(quick: bool) -> Iterator[Result]:
    """Time of an epoch, deterministic against not."""
    cases = [
        ("2 to 40 items", [Jittery(i, 2, 40) for i in range(80 if quick else 800)], 1.05, 1.3, (1, 2)),
        ("100 to 200 items", [Jittery(i, 100, 200) for i in range(24 if quick else 160)], 1.02, 1.02, (1,)),
    ]
    prefetch_factors = (2,) if quick else (2, 8)
    for (what, sources, of_plain, of_same, lookaheads), prefetch_factor in itertools.product(cases, prefetch_factors):
        section = f"determinism: 4 workers, 8 lanes, streams of {what}, prefetch_factor={prefetch_factor}"
        contenders: dict[str, Callable[[], float]] = {
            f"{kind}, lookahead={lookahead}": partial(
                epoch_seconds, sources, prefetch_factor, kind == "ordered", lookahead
            )
            for lookahead in (0, *lookaheads)
            for kind in ("first come", "ordered")
        }
        in_time = "ordered, lookahead=1, opened in time"  # what factories have that do not declare open_early
        contenders[in_time] = partial(epoch_seconds, sources, prefetch_factor, True, 1, False)
        about = f"{what}, prefetch_factor={prefetch_factor}"
        rounds = take_turns(contenders, 2 if quick else 7, about, warm_up=not quick)
        yield from (figure(section, name, values, "s") for name, values in rounds.items())
        plain = "first come, lookahead=0"
        yield ratio(section, f"ordered, lookahead=0 / {plain}", rounds, "ordered, lookahead=0", plain)
        yield ratio(section, f"{in_time} / {plain}", rounds, in_time, plain)
        for lookahead in lookaheads:
            name, same = f"ordered, lookahead={lookahead}", f"first come, lookahead={lookahead}"
            yield ratio(section, f"{name} / {plain}", rounds, name, plain, of_plain)
            yield ratio(section, f"{name} / {same}", rounds, name, same, of_same)


# main process ---------------------------------------------------------------------------------------------------------

TINY = np.zeros((1, 64), np.uint8)
MOST_MICROSECONDS = 300.0
READY_BATCHES = 24  # of one epoch: the parts of so few wait in the workers' pipe, not behind it


def tiny_windows(count: int) -> Iterable[np.ndarray[Any, Any]]:
    """A stream of tiny windows that costs nothing."""
    return itertools.repeat(TINY, count)


class Blobs(IterableDataset[bytes]):
    """As many objects a worker, of about the size of a part, for torch's own `DataLoader`."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[bytes]:
        return itertools.repeat(b"\0" * 800, self._count)


def as_it_is(content: Any) -> Any:
    """Stands for no collating."""
    return content


def ready_seconds(loader: Iterable[Any], each: int, epochs: int) -> list[float]:
    """Wall time of `next` while all parts of the epoch are there and the workers have nothing left to do.

    Args:
        loader: With persistent workers, and epochs of `READY_BATCHES`.
        each: How many `next` make a batch.
        epochs: How often to wait for the workers, and then to read.
    """
    seconds = []
    for _ in range(epochs):
        iterator = iter(loader)
        time.sleep(0.05)
        for _ in range(READY_BATCHES):
            start = time.perf_counter()
            for _ in range(each):
                next(iterator)
            seconds.append(time.perf_counter() - start)
        assert next(iterator, None) is None, "the epoch is read to its end: else its workers are lost"
    return seconds


def processor_seconds(loader: Iterable[Any], batches: int) -> tuple[float, float]:
    """Processor time a batch while the workers run: of the main thread, and of all threads of this process.

    The latter has those of torch's queues too, and, at a hundredth of a run, the start of the workers.
    """
    thread, process = time.thread_time(), time.process_time()
    for _ in loader:
        pass
    return (time.thread_time() - thread) / batches, (time.process_time() - process) / batches


def measure_main_process(quick: bool) -> list[Result]:
    """Microseconds a batch in the main process."""
    section = "main process: 2 workers, 8 lanes of (1, 64) uint8 windows"
    workers, epochs, long_epoch = 2, 10 if quick else 30, 2000 if quick else 10_000
    seen: dict[str, list[tuple[float, float]]] = {"ours": [], "torch": []}

    def ours(batches: int) -> Iterable[Any]:
        dataset = StreamDataset([batches] * LANES, tiny_windows, LANES, seed=0, windows="given")
        prefetch = READY_BATCHES + 2
        return StreamDataLoader(dataset, workers, prefetch_factor=prefetch, persistent_workers=True)

    def bare(batches: int) -> Iterable[Any]:
        return DataLoader(
            Blobs(batches),
            batch_size=None,
            num_workers=workers,
            prefetch_factor=READY_BATCHES + 2,
            persistent_workers=True,
            collate_fn=as_it_is,
        )

    def timed(name: str, loader: Callable[[int], Iterable[Any]], each: int) -> float:
        seen[name].append(processor_seconds(loader(long_epoch), long_epoch))
        return statistics.median(ready_seconds(loader(READY_BATCHES), each, epochs)) * 1e6

    contenders = {"ours": partial(timed, "ours", ours, 1), "torch": partial(timed, "torch", bare, workers)}
    rounds = take_turns(contenders, 3 if quick else 9, warm_up=not quick)
    results = []
    for name, who, target in (
        ("ours", "ours", MOST_MICROSECONDS),
        ("torch", "torch's DataLoader, 2 bytes objects", None),
    ):
        threads, processes = zip(*seen[name][1:], strict=True)  # the first round does not count
        results.append(figure(section, f"{who}: next, batch ready", rounds[name], "us", target))
        for what, times in (("main thread", threads), ("whole process", processes)):
            results.append(figure(section, f"{who}: processor, {what}", [1e6 * t for t in times], "us", target))
    results.append(ratio(section, "next, batch ready: ours / torch's DataLoader", rounds, "ours", "torch"))
    return results


# live -----------------------------------------------------------------------------------------------------------------

PICTURE = np.zeros((3, 240, 320), np.uint8)


def open_camera(pictures_per_second: float) -> Iterator[np.ndarray[Any, Any]]:
    """A picture at a time that does not depend on who reads."""
    begin = time.monotonic()
    for number in itertools.count(1):
        time.sleep(max(begin + number / pictures_per_second - time.monotonic(), 0))
        yield PICTURE


class SlowServer(BaseHTTPRequestHandler):
    """Answers after as many seconds as the path says."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer is one packet

    def do_GET(self) -> None:
        time.sleep(float(self.path[1:]))
        self.send_response(200)
        self.send_header("Content-Length", "4096")
        self.end_headers()
        self.wfile.write(bytes(4096))

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def open_remote(source: tuple[int, float]) -> Iterator[np.ndarray[Any, Any]]:
    """Asks a port for one answer after another, over one connection."""
    port, seconds = source
    with contextlib.closing(HTTPConnection("127.0.0.1", port)) as connection:
        while True:
            connection.request("GET", f"/{seconds}")
            yield np.frombuffer(connection.getresponse().read(), np.uint8)


def read_for(seconds: float, sources: Sequence[Any], factory: StreamFactory) -> tuple[float, float]:
    """Batches a second, and the share of cells without an item, from the first batch on."""
    dataset = StreamDataset(sources, factory, len(sources), time_steps=1, deterministic=False)
    batches = iter(StreamDataLoader(dataset, num_workers=2))
    next(batches)
    begin, masks = time.monotonic(), []
    while time.monotonic() - begin < seconds:
        masks.append(next(batches).mask)
    return len(masks) / (time.monotonic() - begin), 1 - torch.cat(masks).float().mean().item()


def measure_live(quick: bool) -> Iterator[Result]:
    """Batches a second and idle cells, with `streams.live` and without."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), SlowServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    remote = [(server.server_port, 0.2 if lane == 0 else 0.01) for lane in range(LANES)]
    cases: dict[str, tuple[Sequence[Any], StreamFactory]] = {
        "cameras of 30 and 5 pictures/s": ([30.0, 5.0], open_camera),
        "a server, 10 ms an item, one stream of 8 200 ms": (remote, open_remote),
    }
    for what, (sources, factory) in cases.items():
        factories = {"waits for all": factory}
        factories |= {f"max_wait_seconds={wait}": streams.live(factory, wait) for wait in (0.05, 0.02, 0.0)}
        seconds = 0.5 if quick else 3.0
        contenders = {name: partial(read_for, seconds, sources, own) for name, own in factories.items()}
        rounds = run_in_turns(contenders, 1 if quick else 3, what, warm_up=False)
        for name, values in rounds.items():
            speeds, idle = zip(*values, strict=True)
            yield figure(f"live: {what}", name, speeds, "batches/s")
            yield figure(f"live: {what}", f"{name}: idle", [100 * share for share in idle], "%")
    server.shutdown()
    server.server_close()


SECTIONS: dict[str, Section] = {
    "overhead": measure_overhead,
    "determinism": measure_determinism,
    "main": measure_main_process,
    "live": measure_live,
}


if __name__ == "__main__":
    run(__doc__, SECTIONS)
