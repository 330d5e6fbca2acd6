"""Cost of bringing batches to a CUDA device, and unnecessary waits.

- `check`: all numbers arrive while the device lags behind and slots are written again; of two loaders at once; under
  autograd; to each device there is, while another is current; and after memory ran out. Nothing is measured if this
  fails.
- `copy`: GB/s of batches that need no reading, against a bare copy from page-locked memory in a loop.
- `wait`: steps of a model that takes twice as long as the copy, with the loader and on a batch that lies there; the
  same of a step made by `torch.compile`, but for `--quick`.
- `two`: GB/s of two loaders that take turns, against one.
- `decoding`: videos by the device's decoder, see `gpu_decoding`.
- `trace`: what torch's profiler sees within `next`: calls that wait for the device, allocations, copies from pageable
  memory.

Guarantees: contenders take turns, see `interleaved`; start-up, page-locking and the first allocations are not counted.
A stream leaves the batch's memory as it is, so that workers cost next to nothing. Without a CUDA device it says so, and
measures nothing. It has not run on a device yet; `--device cpu` runs what needs none, to see that the program is whole.
Run it as `python benchmarks/gpu.py [--quick] [--json PATH] [--only SECTION] [--device DEVICE] [--trace PATH]`.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gpu_decoding import decoding
from interleaved import LeftOut, Result, Row, figure, ratio, run_in_turns, take_turns
from program import Section, measure, parser_of

from stream_dataloader import StreamDataLoader, StreamDataset

Way = Callable[[int, int, torch.device], float]

LANES, TIME_STEPS, WORKERS, WARM_UP = 8, 16, 2, 8
MB, GB = 1e6, 1e9
NEXT = "next batch"
SYNCHRONIZES = [f"cuda{name}Synchronize" for name in ("Stream", "Device", "Event")]
WAITS = [*SYNCHRONIZES, "cudaMemcpy", "cudaMalloc", "cudaFree"]
HEAVY = 2.0  # how many times as long as a copy the model of `wait` and `trace` takes


class Untouched:
    """A stream without end that leaves the batch as it is."""

    def __init__(self, item_bytes: int, source: int) -> None:
        del source
        self._item = np.zeros(item_bytes, np.uint8)

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._item

    def read_into(self, out: Any) -> int:
        """Say that all was written."""
        return len(out)


def numbered(length: int) -> Iterator[Any]:
    """Items that are full of their own position."""
    return (np.full(20_000, i, np.float32) for i in range(length))


def loader_of(item_bytes: int, **options: Any) -> StreamDataLoader:
    """Batches that need no reading, without end."""
    dataset = StreamDataset(range(LANES), partial(Untouched, item_bytes), LANES, time_steps=TIME_STEPS)
    return StreamDataLoader(dataset, WORKERS, **options)


def synchronize(device: torch.device) -> None:
    """Wait until a device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# check


def check(device: torch.device) -> Iterator[Result]:
    """Raise if anything is wrong on a device."""
    size = 4096 if device.type == "cuda" else 256
    busy, wrong = torch.ones(size, size, device=device), torch.zeros((), dtype=torch.int64, device=device)
    current, steps = device.type == "cuda" and torch.cuda.current_device(), 0
    for both in zip(numbers(device=device), numbers(device=device), strict=True):
        busy = (busy @ busy).clamp(0, 1)  # so that the device lags behind, and slots are written again meanwhile
        for batch in both:
            there = batch.data == batch.position.clamp(min=0).unsqueeze(-1)
            wrong += (~there.all(-1)).sum()
        steps += 2
    items = steps * TIME_STEPS * LANES
    assert int(wrong) == 0, f"{int(wrong)} of {items} items are wrong on {device}"
    expected, found = gradient(None), gradient(device).cpu()
    most = float(expected.abs().max())
    assert float((expected - found).abs().max()) <= 1e-3 * most, "another gradient than on the CPU"
    name = "this machine's CPU"
    if device.type == "cuda":
        assert torch.cuda.current_device() == current, "the current device changed"
        out_of_memory(device)
        name = torch.cuda.get_device_name(device)
    yield figure(f"All numbers arrived on {device}, {name}", "items", [items], "")


def checks(_quick: bool, device: torch.device) -> Iterator[Result]:
    """All devices, or the one that is no CUDA device."""
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    for one in [torch.device("cuda", number) for number in range(count)] or [device]:
        yield from check(one)


def numbers(**options: Any) -> StreamDataLoader:
    """Batches of 10 MB whose items are full of their position."""
    return StreamDataLoader(StreamDataset([200] * LANES, numbered, LANES, time_steps=TIME_STEPS), WORKERS, **options)


def gradient(device: torch.device | None) -> torch.Tensor:
    """Of a model's weight, over some batches."""
    weight = torch.full((20_000,), 0.1, device=device, requires_grad=True)
    for batch in numbers(device=device):
        ((batch.data * weight).tanh() * batch.mask.unsqueeze(-1)).mean().backward()
    assert weight.grad is not None
    return weight.grad


def out_of_memory(device: torch.device) -> None:
    """See that a batch that had no room is told, and comes when there is room again."""
    expected = [batch.batch_index for batch in numbers()]
    found: list[int] = []
    held: list[Any] = []
    iterator, failed = iter(numbers(device=device)), False
    while True:
        if len(found) == 3 and not failed:
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(0.0, device)
        try:
            batch = next(iterator)
        except StopIteration:
            break
        except torch.cuda.OutOfMemoryError:
            failed = True
            torch.cuda.set_per_process_memory_fraction(1.0, device)
            held.clear()
            continue
        found.append(batch.batch_index)
        if not failed:
            held.append(batch)
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert failed, "there was room all the same"
    assert found == expected, f"steps {found} came, for want of memory"


# copy


def rate(steps: int, size: int, device: torch.device, step: Callable[[], object]) -> float:
    """Bytes a second of so many steps that bring `size` bytes each."""
    for _ in range(WARM_UP):
        step()
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(device)
    return steps * size / (time.perf_counter() - begin)


def bare(size: int, steps: int, device: torch.device) -> float:
    """Of a copy in a loop, which is all that the link can do."""
    hosts = [torch.zeros(size, dtype=torch.uint8) for _ in range(4)]
    if device.type == "cuda":
        hosts = [host.pin_memory() for host in hosts]
    there = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    turns = itertools.count()

    def step() -> None:
        turn = next(turns)
        there[turn % 2].copy_(hosts[turn % 4], non_blocking=True)

    return rate(steps, size, device, step)


def by_loader(size: int, steps: int, device: torch.device) -> float:
    """Of batches that the loader copies one ahead."""
    batches = iter(loader_of(size // (LANES * TIME_STEPS), device=device))
    return rate(steps, size, device, lambda: next(batches))


def by_user(size: int, steps: int, device: torch.device) -> float:
    """Of batches that the user moves."""
    batches = iter(loader_of(size // (LANES * TIME_STEPS), pin_memory=device.type == "cuda"))
    return rate(steps, size, device, lambda: next(batches).to(device, non_blocking=True))


def by_two(size: int, steps: int, device: torch.device) -> float:
    """Of two loaders that take turns."""
    both = itertools.cycle([iter(loader_of(size // (LANES * TIME_STEPS), device=device)) for _ in range(2)])
    return rate(steps, size, device, lambda: next(next(both)))


def rates(
    title: str, sizes: Sequence[int], ways: Mapping[str, Way], quick: bool, device: torch.device
) -> Iterator[Row]:
    """GB/s by the size of a batch, and in units of the first way's."""
    first = next(iter(ways))
    for size in sizes:
        steps = max(20, min(400, (1 << (30 if quick else 32)) // size))
        contenders = {name: partial(way, size, steps, device) for name, way in ways.items()}
        found = take_turns(contenders, 3 if quick else 9, f"{size / MB:,.1f} MB")
        section = f"{title} of {size / MB:,.1f} MB"
        yield from (figure(section, name, [value / GB for value in values], "GB/s") for name, values in found.items())
        least = 0.9 if size >= 1 << 24 else None  # smaller ones are latency
        for name in list(ways)[1:]:
            yield ratio(section, f"{name} / {first}", found, name, first, least, at_most=False)


def copies(quick: bool, device: torch.device) -> Iterator[Row]:
    """The loader's copies, and the user's, against a bare copy."""
    sizes = [1 << power for power in ((20, 24, 26) if quick else (18, 20, 22, 24, 26, 28))]
    ways = {"bare copy": bare, "loader, device=": by_loader, "loader, moved by the user": by_user}
    yield from rates("Copies", sizes, ways, quick, device)


def two_loaders(quick: bool, device: torch.device) -> Iterator[Row]:
    """Two loaders to one device, against one."""
    yield from rates("Batches", [1 << 24], {"one loader": by_loader, "two loaders": by_two}, quick, device)


# wait


class Model:
    """Work for a device that takes some multiple of the time to copy a batch."""

    def __init__(self, size: int, device: torch.device) -> None:
        width = 4096 if device.type == "cuda" else 256
        self._weight, self._device = torch.ones(width, width, dtype=torch.bfloat16, device=device), device
        self._out = torch.empty_like(self._weight)
        self.work = 1
        one = self._seconds_of(20)
        self.work = max(1, math.ceil(HEAVY * size / bare(size, 20, device) / one))

    def _seconds_of(self, steps: int) -> float:
        synchronize(self._device)
        begin = time.perf_counter()
        for _ in range(steps):
            self()
        synchronize(self._device)
        return (time.perf_counter() - begin) / steps

    def __call__(self, data: torch.Tensor | None = None) -> None:
        if data is not None:
            self._weight[0, :64] = data.view(-1)[:64].clamp(0, 1)
        for _ in range(self.work):
            torch.mm(self._weight, self._weight, out=self._out)


class Steps(NamedTuple):
    """Some steps of training.

    Attributes:
        seconds: Of a step.
        in_next: Of the host in `next`, in the median.
        ahead: By how many batches the memory in use grew at the most.
    """

    seconds: float
    in_next: float
    ahead: float


def trained(
    step: Callable[[torch.Tensor], object], device: torch.device, size: int, steps: int, batches: Iterator[torch.Tensor]
) -> Steps:
    """Steps that read nothing back, so that the host gets ahead of the device."""
    for _ in range(WARM_UP):
        step(next(batches))
    synchronize(device)
    before, most = 0, 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    spent: list[float] = []
    begin = time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        data = next(batches)
        spent.append(time.perf_counter() - asked)
        step(data)
    synchronize(device)
    seconds = (time.perf_counter() - begin) / steps
    if device.type == "cuda":
        most = torch.cuda.max_memory_allocated()
    return Steps(seconds, statistics.median(spent), (most - before) / size)


def waiting(quick: bool, device: torch.device) -> Iterator[Row]:
    """Whether a model that is slower than the copy is held up; and what `next` takes of the host's time."""
    size, steps, rounds = 64 << 20, 20 if quick else 100, 3 if quick else 9
    kinds: dict[str, Callable[[torch.Tensor], object]] = {"eager": Model(size, device)}
    if not quick:
        kinds["compiled"] = torch.compile(lambda data: data.float().square().mean().sqrt())
    there = torch.zeros(size, dtype=torch.uint8, device=device)
    for kind, step in kinds.items():

        def alone(step: Callable[[torch.Tensor], object] = step) -> Steps:
            return trained(step, device, size, steps, itertools.repeat(there))

        def loaded(step: Callable[[torch.Tensor], object] = step) -> Steps:
            batches = loader_of(size // (LANES * TIME_STEPS), device=device)
            return trained(step, device, size, steps, (batch.data.view(-1) for batch in batches))

        found = run_in_turns({"alone": alone, "loader": loaded}, rounds, kind)
        seconds = {name: [some.seconds for some in outcomes] for name, outcomes in found.items()}
        what = f"takes {HEAVY:g} x as long as a copy" if kind == "eager" else "is compiled"
        section = f"A step that {what}, of {size / MB:,.0f} MB"
        yield ratio(section, "a step with the loader / without", seconds, "loader", "alone", 1.02)
        yield figure(section, "host's time in next", [1e3 * some.in_next for some in found["loader"]], "ms")
        yield figure(
            section, "more batches on the device at the most", [some.ahead for some in found["loader"]], "", 6.0
        )
    if quick:
        yield LeftOut("A step that is compiled", "a step with the loader / without", "takes too long with --quick")


# trace


def traced(quick: bool, device: torch.device, path: Path | None) -> Iterator[Row]:
    """Trace `next` with torch's profiler."""
    if device.type != "cuda":
        yield LeftOut("Within next", "calls that wait", "needs a CUDA device")
        return
    from torch.profiler import ProfilerActivity, profile, record_function

    size, steps = 16 << 20, 10 if quick else 50
    model, batches = Model(size, device), iter(loader_of(size // (LANES * TIME_STEPS), device=device))
    for _ in range(WARM_UP):
        model(next(batches).data)
    torch.cuda.synchronize()
    before = torch.cuda.Event()  # type: ignore[no-untyped-call]
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            with record_function(NEXT):
                batch = next(batches)
            model(batch.data)
            del batch
            before.synchronize()  # as a loop does that reads the loss of the step before
            before.record()
        torch.cuda.synchronize()
    if path is not None:
        profiler.export_chrome_trace(str(path))
    events = list(profiler.events())
    on_host = [event for event in events if str(event.device_type).endswith("CPU")]
    spans = [event.time_range for event in on_host if event.name == NEXT]
    within: Counter[str] = Counter()
    for event in on_host:
        if event.name in WAITS and any(span.start <= event.time_range.start <= span.end for span in spans):
            within[event.name] += 1
    pageable = sum("HtoD" in event.name and "Pageable" in event.name for event in events)
    copied = sum("HtoD" in event.name for event in events)
    section = f"Within next, a batch ({len(spans)} of {steps} batches seen)"
    yield from (figure(section, name, [within[name] / steps], "", 0.0) for name in WAITS)
    yield figure(section, "copies from pageable memory", [pageable / steps], "", 0.0)
    yield figure(section, "copies to the device", [copied / steps], "")


def decoded(quick: bool, device: torch.device) -> Iterator[Row]:
    """Videos by the device's decoder."""
    if device.type != "cuda":
        yield LeftOut("Videos", "frames a second", "needs a CUDA device")
        return
    yield from decoding(str(device), 3 if quick else 9, quick=quick)


SECTIONS: dict[str, Callable[..., Iterator[Row]]] = {
    "check": checks,
    "copy": copies,
    "wait": waiting,
    "two": two_loaders,
    "decoding": decoded,
}


def main() -> None:
    """Measure, and print as it goes."""
    parser = parser_of(__doc__, [*SECTIONS, "trace"])
    parser.add_argument("--device", type=torch.device, help="the current CUDA device; cpu: what needs none")
    parser.add_argument("--trace", type=Path, metavar="PATH", help="write the profiler's trace to a file")
    options = parser.parse_args()
    if options.device is None and not torch.cuda.is_available():
        print("no CUDA device here: nothing is measured")
        return
    device = options.device or torch.device("cuda", torch.cuda.current_device())
    sections: dict[str, Section] = {name: partial(section, device=device) for name, section in SECTIONS.items()}
    measure(sections | {"trace": partial(traced, device=device, path=options.trace)}, options)


if __name__ == "__main__":
    main()
