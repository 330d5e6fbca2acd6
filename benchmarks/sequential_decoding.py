"""Reading videos in order against the same frames at random places, with the same decoder.

    python benchmarks/sequential_decoding.py [--quick] [--runs 3] [--out docs/assets]

A compressed video can be entered at key frames only. Who wants a frame elsewhere has to decode all frames from the key
frame before it. Lanes that read videos in order decode each frame once. Loaders of shuffled clips enter the video
at a random place for each clip. Contenders, for videos with a key frame every 12, 50 and 250 frames:

- in order, to the end of each video;
- clips of 16 frames, which begin at multiples of 16, in random order;
- single frames in random order.

Each is measured twice: with `VideoStream` in a loader of four lanes and two workers, where a clip is a source
`(path, start, stop)` and so opens its file; and with PyAV alone in one process, where files stay open and only
seeking and decoding is left. What counts is processor time, of all processes together, so that a busy machine does not
matter: a frame a second is one that a core delivers in a second that it works for us. Contenders take turns, see
`interleaved`; those at random places read as many clips or frames as `SAMPLED` says, drawn anew each round.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
from interleaved import run_in_turns
from proof import BLUE, PURPLE, VERMILION, figure_of, options_of, panels, span, table, told, write
from video_clips import make_clips

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.streams import VideoStream

KEY_INTERVALS, LANES, WORKERS, CLIP = (12, 50, 250), 4, 2, 16
SIZE = (180, 320)
ORDER, CLIPS, SINGLE = "in order", "clips of 16 at random", "single frames at random"
#: How many frames of a clip, and how many clips are read a round.
SAMPLED = {CLIPS: (CLIP, 24), SINGLE: (1, 48)}


class Section(NamedTuple):
    """Frames `[start, stop)` of a file, as `VideoStream` takes them."""

    path: str
    start: int
    stop: int


def sections_of(paths: list[str], frames: int, how: str, rng: np.random.Generator) -> list[Section]:
    """Return the sections to read, in order."""
    if how == ORDER:
        return [Section(path, 0, frames) for path in paths]
    steps, count = SAMPLED[how]
    places = [Section(path, start, start + steps) for path in paths for start in range(0, frames - steps + 1, steps)]
    return [places[i] for i in rng.permutation(len(places))[:count]]


def with_loader(sections: list[Section]) -> int:
    """Frames that the loader delivers."""
    steps = min(CLIP, sections[0].stop - sections[0].start)
    sources = [tuple(section) for section in sections]
    dataset = StreamDataset(sources, VideoStream(size=SIZE), LANES, time_steps=steps)
    return sum(int(batch.mask.sum()) for batch in StreamDataLoader(dataset, WORKERS))


def frames_from(container: Any, start: int) -> Iterator[Any]:
    """The frames of an open file from a number on: enter at the key frame before, decode up to it."""
    video = container.streams.video[0]
    time_of = start / video.average_rate / video.time_base + (video.start_time or 0)
    container.seek(int(time_of), stream=video)  # lands at or before
    for frame in container.decode(video):
        if frame.pts >= int(time_of):
            yield frame


def processor_seconds() -> float:
    """Of this process and those that it started and that have ended."""
    return sum(os.times()[:4])


class Decoder:
    """PyAV alone, in one thread; files stay open."""

    def __init__(self, paths: list[str]) -> None:
        self._containers = {path: av.open(path) for path in paths}
        for container in self._containers.values():
            video = container.streams.video[0]
            video.thread_type, video.codec_context.thread_count = "NONE", 1

    def __call__(self, sections: list[Section]) -> int:
        """Decode and scale; how many frames there were."""
        count = 0
        for path, start, stop in sections:
            for frame, _ in zip(frames_from(self._containers[path], start), range(stop - start), strict=False):
                frame.reformat(SIZE[1], SIZE[0], "rgb24").to_ndarray()
                count += 1
        return count


def measured(key_interval: int, clips: int, frames: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Frames a second of each round, by reader and contender."""
    paths = make_clips(clips, frames, key_interval)
    readers: dict[str, Callable[[list[Section]], int]] = {"loader": with_loader, "decoder": Decoder(paths)}
    found: dict[str, dict[str, list[float]]] = {}
    for name, read in readers.items():
        rng = np.random.default_rng(0)

        def rate(how: str, read: Callable[[list[Section]], int] = read, rng: np.random.Generator = rng) -> float:
            sections = sections_of(paths, frames, how, rng)
            begun = processor_seconds()
            count = read(sections)
            seconds = processor_seconds() - begun
            assert count == sum(section.stop - section.start for section in sections)
            return count / seconds

        contenders = {how: (lambda how=how, rate=rate: rate(how)) for how in (ORDER, CLIPS, SINGLE)}
        found[name] = run_in_turns(contenders, rounds, f"a key frame every {key_interval}, {READERS[name]}")
    return found


def summary(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Frames a second, and how many times as many come in order, round by round."""
    factors = {how: [a / b for a, b in zip(rates[ORDER], rates[how], strict=True)] for how in (CLIPS, SINGLE)}
    return {
        "frames a second": {how: span(values) for how, values in rates.items()},
        "factor": {how: span(values) for how, values in factors.items()},
    }


READERS = {"loader": "loader, 2 workers", "decoder": "decoder alone, files kept open"}


def tables(numbers: dict[str, Any]) -> list[str]:
    """The tables of the page, in Markdown."""
    rows = [
        [
            READERS[reader],
            str(interval),
            *(told(found[reader]["frames a second"][how], 0) for how in (ORDER, CLIPS, SINGLE)),
            *(told(found[reader]["factor"][how], 1) for how in (CLIPS, SINGLE)),
        ]
        for reader in READERS
        for interval, found in numbers["key intervals"].items()
    ]
    head = ["reader", "key frame every", "in order, frames/s", "clips", "single frames"]
    return [table([*head, "in order / clips", "in order / single"], rows)]


def draw(numbers: dict[str, Any], path: Path) -> None:
    """Frames a second by key interval, a panel a reader."""
    image, axes = panels(2, height=3.8, sharey=True)
    styles = {ORDER: (BLUE, "", -0.27), CLIPS: (VERMILION, "//", 0.0), SINGLE: (PURPLE, "..", 0.27)}
    for one, (reader, title) in zip(axes, READERS.items(), strict=True):
        for how, (color, hatch, shift) in styles.items():
            cells = [found[reader]["frames a second"][how] for found in numbers["key intervals"].values()]
            heights = [cell["mean"] for cell in cells]
            errors = [[cell["mean"] - cell["low"] for cell in cells], [cell["high"] - cell["mean"] for cell in cells]]
            places = [i + shift for i in range(len(cells))]
            one.bar(places, heights, 0.25, color=color, hatch=hatch, edgecolor="white", label=how)
            one.errorbar(places, heights, errors, fmt="none", ecolor="0.15", capsize=3, linewidth=1)
        one.set_xticks(range(len(numbers["key intervals"])), list(numbers["key intervals"]))
        one.set_xlabel("frames from key frame to key frame")
        one.set_title(title, fontsize=11)
        one.set_yscale("log")
        one.set_ylim(1, 1000)
        one.yaxis.set_major_formatter("{x:,.0f}")
        one.grid(visible=False, axis="x")
    axes[0].set_ylabel("frames a second of processor time")
    image.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    image.savefig(path)


def main() -> None:
    """Measure, draw."""
    options = options_of("Frames a second in order, and at random places.", quick_runs=3)
    clips, frames = (2, 60) if options.quick else (4, 500)
    intervals = KEY_INTERVALS[:1] if options.quick else KEY_INTERVALS
    found = {}
    for interval in intervals:
        rates = measured(interval, clips, frames, options.runs)
        found[str(interval)] = {reader: summary(of_reader) for reader, of_reader in rates.items()}
    numbers = {"clips": clips, "frames": frames, "runs": options.runs, "key intervals": found}
    draw(numbers, options.out / "sequential_decoding.png")
    print("\n\n".join(tables(numbers)))
    rows = [
        figure_of(f"{READERS[reader]}, a key frame every {interval}", f"in order / {how}", factor, "x")
        for interval, readers in found.items()
        for reader, of_reader in readers.items()
        for how, factor in of_reader["factor"].items()
    ]
    write(options, "sequential_decoding", numbers, rows)


if __name__ == "__main__":
    main()
