"""Hours of epochs of video, while workers are killed: does anything grow?

A loader with two workers reads clips epoch after epoch, one in four to its middle only. Every 30 seconds a worker is
killed; statistics are read, states are saved, and now and then one is loaded. Meanwhile are noted: memory of the main
process and of its workers (what they wrote, shared pages in equal shares), descriptors, threads, the use of `/dev/shm`,
and how long batches take to come.

Guarantee: what is judged is the last quarter of the run against the first, without its first tenth, in which buffers
come to their size; the slope of all samples is printed beside it. Run it as
`python benchmarks/soak.py [--quick] [--minutes MINUTES] [--pause SECONDS] [--json PATH] [--figure PATH]`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import live
import numpy as np
import psutil
from interleaved import Result
from program import measure, parser_of
from reliability_epochs import written_bytes
from reliability_runs import counting_restarts, kill_one
from video_clips import make_clips

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.streams import VideoStream

MINUTES = {True: 0.5, False: 60.0}
SAMPLES = 120
KILL_SECONDS = 30.0
#: Unit of what is noted, and how much more of it the last quarter may have.
NOTED: dict[str, tuple[str, float]] = {
    "main process": ("MB", 1.02),
    "workers": ("MB", 1.02),
    "descriptors": ("", 1.0),
    "threads": ("", 1.0),
    "/dev/shm": ("MB", 1.05),  # other programs use it too
    "a batch, median": ("ms", 1.1),
    "a batch, 99.9 %": ("ms", 1.5),
}


@dataclass
class Soak:
    """Measurements of the run.

    Attributes:
        minutes: When each sample was taken.
        samples: What is noted, by name.
        did: How often what was done.
    """

    minutes: list[float] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in NOTED})
    did: dict[str, int] = field(default_factory=dict)

    def count(self, what: str, often: int = 1) -> None:
        """Something was done."""
        self.did[what] = self.did.get(what, 0) + often

    def sample(self, minute: float, seconds: list[float]) -> None:
        """Note how things stand, and how long batches took since the last time."""
        main, workers = psutil.Process(), 0
        for child in main.children():
            try:
                workers += written_bytes(child.pid)
            except OSError:  # it ends meanwhile
                return
        shared = shutil.disk_usage("/dev/shm").used
        latency = 1e3 * np.quantile(seconds, [0.5, 0.999])
        memory = written_bytes(main.pid) / 1e6, workers / 1e6
        held = len(os.listdir("/proc/self/fd")), threading.active_count(), shared / 1e6
        self.minutes.append(minute)
        for name, value in zip(NOTED, (*memory, *held, *latency), strict=True):
            self.samples[name].append(float(value))


def loader_of(paths: list[str]) -> StreamDataLoader:
    """Windows of the clips."""
    dataset = StreamDataset(paths, VideoStream(size=(120, 180)), 4, time_steps=8, shuffle=True, seed=0)
    return StreamDataLoader(dataset, 2, max_restarts=1000)


def epoch(loader: StreamDataLoader, soak: Soak, rng: random.Random, seconds: list[float]) -> Iterator[None]:
    """Read one, or half of one; now and then go on from a state."""
    leave = rng.randrange(20, 60) if rng.random() < 0.25 else None
    batches, state = iter(loader), None
    for step in itertools.count():
        begun = time.perf_counter()
        batch = next(batches, None)
        if batch is None or step == leave:
            break
        seconds.append(time.perf_counter() - begun)
        if step % 5 == 0:
            loader.stats()
            soak.count("statistics read")
        if step % 10 == 5:
            state = loader.state_dict()
            soak.count("states saved")
        yield
    soak.count("epochs left" if leave is not None else "epochs read")
    if leave is not None and state is not None and rng.random() < 0.5:
        loader.load_state_dict(state)
        soak.count("states loaded")


def soaked(minutes: float, quick: bool, pause: float) -> Soak:
    """Read for so long."""
    paths, soak, rng = make_clips(8, 150 if quick else 600), Soak(), random.Random(0)
    loader, begun, seconds = loader_of(paths), time.monotonic(), list[float]()
    kill, sample = min(KILL_SECONDS, 10 * minutes), 60 * minutes / SAMPLES
    next_kill, next_sample = begun + kill, begun + 6 * minutes
    with counting_restarts() as restarts:
        while time.monotonic() < begun + 60 * minutes:
            for _ in epoch(loader, soak, rng, seconds):
                time.sleep(pause)
                now = time.monotonic()
                soak.count("batches")
                if now >= next_kill:
                    next_kill = now + kill
                    soak.count("workers killed", kill_one(rng))
                elif now >= next_sample and next_kill - now < kill - 3:  # new workers have all they need
                    next_sample = now + sample
                    soak.sample((now - begun) / 60, seconds)
                    seconds.clear()
                    live.doing(f"{soak.minutes[-1:]} minutes: {soak.did}")
    soak.did["restarts"] = restarts.count
    return soak


def draw(soak: Soak, path: Path) -> None:
    """Draw the measurements over time."""
    from matplotlib.figure import Figure  # needed only here

    image = Figure(figsize=(8, 1.2 * len(NOTED)), dpi=110, layout="constrained")
    rows: Any = image.subplots(len(NOTED), sharex=True)
    for axes, (name, values) in zip(rows, soak.samples.items(), strict=True):
        axes.plot(soak.minutes, values, linewidth=1)
        axes.set_ylim(0, 1.2 * max(values) or 1)
        axes.set_title(f"{name} ({NOTED[name][0]})".replace(" ()", ""), fontsize=9, loc="left")
        axes.grid(color="0.9")
    rows[-1].set_xlabel("minutes")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.savefig(path)


def measure_soak(quick: bool, minutes: float | None, pause: float, figure: Path | None) -> Iterator[Result]:
    """The last quarter against the first, and the slope."""
    minutes = minutes or MINUTES[quick]
    soak = soaked(minutes, quick, pause)
    section = f"{minutes:g} minutes: " + ", ".join(f"{count:,} {what}" for what, count in soak.did.items())
    quarter = len(soak.minutes) // 4
    for name, (unit, most) in NOTED.items():
        values = soak.samples[name]
        slope = 60 * float(np.polyfit(soak.minutes, values, 1)[0])
        first, last = values[:quarter], values[-quarter:]
        grown = statistics.median(last) / max(statistics.median(first), 1e-9) if any(last) else 1.0
        spread = min(last) / max(*first, 1e-9), max(last) / max(min(first), 1e-9)
        yield Result(section, name, statistics.median(values), unit, (min(values), max(values)))
        note = f"{slope:+.3g} {unit} an hour"
        yield Result(section, f"{name}, last quarter / first", grown, "x", spread, most, note=note)
    if figure is not None:
        draw(soak, figure)


def main() -> None:
    """Measure, print, draw."""
    parser: argparse.ArgumentParser = parser_of(__doc__, ["soak"])
    parser.add_argument("--minutes", type=float, help="how long (60; 0.5 with --quick)")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that each training step takes (0)")
    parser.add_argument("--figure", type=Path, metavar="PATH", help="draw what was noted, by time")
    options = parser.parse_args()
    measure(
        {"soak": partial(measure_soak, minutes=options.minutes, pause=options.pause, figure=options.figure)}, options
    )


if __name__ == "__main__":
    main()
