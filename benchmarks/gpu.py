"""What it costs to bring batches to a CUDA device, and whether anything waits that need not.

- `check`: all numbers arrive while the device lags behind and slots are written again; under autograd and
  `torch.compile`; to each device there is, while another is current; and after memory ran out. Nothing is measured if
  this fails.
- `copy`: GB/s of batches that need no reading, against a bare copy from page-locked memory in a loop.
- `wait`: steps of a model that takes twice as long as the copy, with the loader and on a batch that lies there.
- `decoding`: videos by the device's decoder, see `gpu_decoding`.
- `trace`: what torch's profiler sees within `next`: calls that wait for the device, allocations, copies from pageable
  memory.

Guarantees: contenders take turns, see `interleaved`; start-up, page-locking and the first allocations are not counted.
A stream leaves the batch's memory as it is, so that workers cost next to nothing. Without a CUDA device it says so, and
measures nothing. It has not run on a device yet. Run it as `python benchmarks/gpu.py [--quick] [--json PATH] [--trace
PATH]`.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gpu_decoding import decoding
from interleaved import Result, figure, print_table, ratio, run_in_turns, take_turns, write_json

from stream_dataloader import StreamDataLoader, StreamDataset

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


# check


def check(device: torch.device) -> None:
    """Raise if anything is wrong on a device."""
    busy, wrong = torch.ones(4096, 4096, device=device), torch.zeros((), dtype=torch.int64, device=device)
    current, steps = torch.cuda.current_device(), 0
    for batch in numbers(device=device):
        busy = (busy @ busy).clamp(0, 1)  # so that the device lags behind, and slots are written again meanwhile
        there = batch.data == batch.position.clamp(min=0).unsqueeze(-1)
        wrong += (~there.all(-1)).sum()
        steps += 1
    assert torch.cuda.current_device() == current, "the current device changed"
    assert int(wrong) == 0, f"{int(wrong)} of {steps * TIME_STEPS * LANES} items are wrong on {device}"
    expected, found = gradient(None), gradient(device).cpu()
    most = float(expected.abs().max())
    assert float((expected - found).abs().max()) <= 1e-3 * most, "another gradient than on the CPU"
    out_of_memory(device)


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
    expected = [batch.step for batch in numbers()]
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
        found.append(batch.step)
        if not failed:
            held.append(batch)
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert failed, "there was room all the same"
    assert found == expected, f"steps {found} came, for want of memory"


def check_compiled(device: torch.device) -> None:
    """See that a compiled function takes what the loader yields."""
    compiled = torch.compile(lambda data, mask: (data.square().mean(-1) * mask).sum())
    for batch in itertools.islice(numbers(device=device), 5):
        eager = (batch.data.square().mean(-1) * batch.mask).sum()
        assert torch.allclose(compiled(batch.data, batch.mask), eager, rtol=1e-3), "another number when compiled"


# copy


def rate(steps: int, size: int, step: Callable[[], object]) -> float:
    """Bytes a second of so many steps that bring `size` bytes each."""
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return steps * size / (time.perf_counter() - begin)


def bare(size: int, steps: int, device: torch.device) -> float:
    """Of a copy in a loop, which is all that the link can do."""
    hosts = [torch.zeros(size, dtype=torch.uint8).pin_memory() for _ in range(4)]
    there = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    turns = itertools.count()

    def step() -> None:
        turn = next(turns)
        there[turn % 2].copy_(hosts[turn % 4], non_blocking=True)

    return rate(steps, size, step)


def by_loader(size: int, steps: int, device: torch.device) -> float:
    """Of batches that the loader copies one ahead."""
    batches = iter(loader_of(size // (LANES * TIME_STEPS), device=device))
    return rate(steps, size, lambda: next(batches))


def by_user(size: int, steps: int, device: torch.device) -> float:
    """Of batches that the user moves."""
    batches = iter(loader_of(size // (LANES * TIME_STEPS), pin_memory=True))
    return rate(steps, size, lambda: next(batches).to(device, non_blocking=True))


def copies(device: torch.device, rounds: int, *, quick: bool) -> list[Result]:
    """GB/s by the size of a batch."""
    results = []
    for size in (1 << 20, 16 << 20, 64 << 20) if quick else (1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28):
        steps = max(20, min(400, (1 << (30 if quick else 32)) // size))
        ways: dict[str, Callable[[int, int, torch.device], float]] = {
            "bare copy": bare,
            "loader, device=": by_loader,
            "loader, moved by the user": by_user,
        }
        found = take_turns({name: partial(way, size, steps, device) for name, way in ways.items()}, rounds)
        section = f"Copies of {size / MB:,.1f} MB"
        rows = [figure(section, name, [value / GB for value in values], "GB/s") for name, values in found.items()]
        least = 0.9 if size >= 1 << 24 else None  # smaller ones are latency
        rows += [
            ratio(section, f"{name} / bare copy", found, name, "bare copy", least, at_most=False)
            for name in list(ways)[1:]
        ]
        print_table(rows)
        results += rows
    return results


# wait


class Model:
    """Work for a device that takes some multiple of the time to copy a batch."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._weight = torch.ones(4096, 4096, dtype=torch.bfloat16, device=device)
        self._out = torch.empty_like(self._weight)
        self.work = 1
        one = self._seconds_of(20)
        self.work = max(1, math.ceil(HEAVY * size / bare(size, 20, device) / one))

    def _seconds_of(self, steps: int) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            self()
        torch.cuda.synchronize()
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


def trained(model: Model, size: int, steps: int, batches: Iterator[torch.Tensor]) -> Steps:
    """Steps that read nothing back, so that the host gets ahead of the device."""
    for _ in range(WARM_UP):
        model(next(batches))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, spent = torch.cuda.memory_allocated(), []
    begin = time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        data = next(batches)
        spent.append(time.perf_counter() - asked)
        model(data)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begin) / steps
    return Steps(seconds, statistics.median(spent), (torch.cuda.max_memory_allocated() - before) / size)


def waiting(device: torch.device, rounds: int, steps: int) -> list[Result]:
    """Whether a model that is slower than the copy is held up; and what `next` takes of the host's time."""
    size = 64 << 20
    model = Model(size, device)

    def alone() -> Steps:
        return trained(model, size, steps, itertools.repeat(torch.zeros(size, dtype=torch.uint8, device=device)))

    def loaded() -> Steps:
        batches = loader_of(size // (LANES * TIME_STEPS), device=device)
        return trained(model, size, steps, (batch.data for batch in batches))

    found = run_in_turns({"alone": alone, "loader": loaded}, rounds)
    seconds = {name: [some.seconds for some in outcomes] for name, outcomes in found.items()}
    section = f"A model that takes {HEAVY:g} x as long as a copy of {size / MB:,.0f} MB"
    results = [
        ratio(section, "a step with the loader / without", seconds, "loader", "alone", 1.02),
        figure(section, "host's time in next", [1e3 * some.in_next for some in found["loader"]], "ms"),
        figure(section, "more batches on the device at the most", [some.ahead for some in found["loader"]], "", 6.0),
    ]
    print_table(results)
    return results


# trace


def traced(device: torch.device, steps: int, path: Path | None) -> list[Result]:
    """What happens within `next`, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile, record_function

    size = 16 << 20
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
    results = [figure(section, name, [within[name] / steps], "", 0.0) for name in WAITS]
    results += [
        figure(section, "copies from pageable memory", [pageable / steps], "", 0.0),
        figure(section, "copies to the device", [copied / steps], ""),
    ]
    print_table(results)
    return results


def main() -> None:
    """Measure, and print as it goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes, rounds and steps: under a minute")
    parser.add_argument("--json", type=Path, help="write the results to a file")
    parser.add_argument("--trace", type=Path, help="write the profiler's trace to a file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing is measured")
        return
    count = torch.cuda.device_count()
    for number in range(count):
        device = torch.device("cuda", number)
        check(device)
        print(f"{device}, {torch.cuda.get_device_name(number)}: all numbers arrived")
    device = torch.device("cuda", torch.cuda.current_device())
    if options.quick:
        print("torch.compile: not tried with --quick")
    else:
        check_compiled(device)
        print("torch.compile: takes what the loader yields")
    rounds = 3 if options.quick else 9
    results = copies(device, rounds, quick=options.quick)
    results += waiting(device, rounds, 20 if options.quick else 100)
    results += decoding(str(device), rounds, quick=options.quick)
    results += traced(device, 10 if options.quick else 50, options.trace)
    if options.json:
        write_json(options.json, results)


if __name__ == "__main__":
    main()
