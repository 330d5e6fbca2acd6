"""Video through loaders, against decoding alone and against peers: same clips, same output size, one run.

Sixteen clips of 640x360 (H.264 with B-frames, about 1.5 Mb/s) become frames of 360x240 uint8 RGB, in eight lanes, in
windows of ten, read by two workers; the consumer does nothing. Each frame is delivered once.

- `decode only`, `decode + convert`: two processes without a loader, each half of the clips; PyAV with one
  thread; converted into an array as a batch has it.
- `pytorch-stream-dataloader 1.0`: fed by a stream of decord's, which scales while it decodes.
- `torch DataLoader`: an iterable dataset of windows, decoded by decord, eight to a batch.

Then: what seeking costs, what a lane takes of memory and threads, how true the colours are. Contenders take turns, see
`interleaved`. Run it as `python benchmarks/video.py [--quick] [--json PATH] [--only SECTION]`; it makes its clips once.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import av
import numpy as np
import psutil
import pytorch_stream_dataloader.stream_dataloader as peer_loader
import pytorch_stream_dataloader.stream_dataset as peer_dataset
from av.video.reformatter import Interpolation, VideoReformatter
from interleaved import LeftOut, Result, Row, figure, ratio, take_turns
from program import Section, run
from together import in_processes
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from video_clips import decibels, long_clip, make_clips, reference, shown_number

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.streams import VideoStream

try:
    import decord
except ImportError:  # the peers are left out
    decord = None

SIZE, LANES, WORKERS, TIME_STEPS = (240, 360), 8, 2, 10
OURS, CONVERTED, DECODED = "stream_dataloader", "decode + convert, 2 processes", "decode only, 2 processes"
PEER, TORCH = "pytorch-stream-dataloader 1.0, decord", "torch DataLoader, decord"
Array = np.ndarray[Any, Any]


def some_clips(quick: bool) -> list[str]:
    """Return the clips to read."""
    return make_clips(16, 150 if quick else 600)


def ours(paths: list[str]) -> int:
    """Frames that the loader delivers."""
    dataset = StreamDataset(paths, VideoStream(size=SIZE), LANES, time_steps=TIME_STEPS)
    loader = StreamDataLoader(dataset, WORKERS)
    for _ in loader:
        pass
    return loader.stats().items


def decoded(container: Any) -> Iterator[Any]:
    """A clip's frames, by one thread."""
    video = container.streams.video[0]
    video.thread_type, video.codec_context.thread_count = "NONE", 1
    frames: Iterator[Any] = container.decode(video)
    return frames


def decode(paths: list[str], convert: bool) -> int:
    """Decode clips in this process, and convert them into one lane of a batch."""
    out, count = np.zeros((TIME_STEPS, LANES, 3, *SIZE), np.uint8), 0
    for lane, path in enumerate(paths):
        reformatter = VideoReformatter()
        with av.open(path) as container:
            for i, frame in enumerate(decoded(container)):
                count += 1
                if not convert:
                    continue
                flags = Interpolation.BILINEAR | Interpolation.ACCURATE_RND
                small = reformatter.reformat(frame, SIZE[1], SIZE[0], "gbrp", interpolation=flags, threads=1)
                planes: Any = small.planes
                for channel, plane in enumerate((planes[2], planes[0], planes[1])):
                    rows = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)
                    out[i % TIME_STEPS, lane % LANES, channel] = rows[: SIZE[0], : SIZE[1]]
    return count


def without_loader(paths: list[str], convert: bool) -> int:
    """The same by two processes."""
    with multiprocessing.Pool(WORKERS) as pool:
        return sum(pool.map(partial(decode, convert=convert), [paths[i::WORKERS] for i in range(WORKERS)], 1))


def decord_windows(path: str) -> Iterator[Array]:
    """Windows `(T, height, width, 3)` of a clip, the last one shorter."""
    reader = decord.VideoReader(path, ctx=decord.cpu(0), width=SIZE[1], height=SIZE[0], num_threads=1)
    for first in range(0, len(reader), TIME_STEPS):
        yield reader.get_batch(range(first, min(first + TIME_STEPS, len(reader)))).asnumpy()


class PeerStream:
    """The same as the existing package wants it: padded windows."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __iter__(self) -> Iterator[Array]:
        for window in decord_windows(self.path):
            missing = TIME_STEPS - len(window)
            yield np.pad(window, ((0, missing), (0, 0), (0, 0), (0, 0))) if missing else window


def collate(windows: Iterable[Array]) -> Array:
    """Stack the lanes' windows."""
    return np.stack(list(windows), 1)


def peer(paths: list[str]) -> int:
    """Batches of the existing package; counts the frames that are in the clips."""
    fill = np.zeros((TIME_STEPS, *SIZE, 3), np.uint8)
    dataset = peer_dataset.StreamDataset(list(paths), PeerStream, LANES, "zeros", fill)
    for _ in peer_loader.StreamDataLoader(dataset, WORKERS, collate):
        pass
    return sum(len(decord.VideoReader(path)) for path in paths[:1]) * len(paths)


class Windows(IterableDataset[Array]):
    """Windows of the worker's clips, one clip after another."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __iter__(self) -> Iterator[Array]:
        worker = get_worker_info()
        assert worker is not None
        for path in self.paths[worker.id :: worker.num_workers]:
            yield from PeerStream(path)


def torch_alone(paths: list[str]) -> int:
    """Batches of torch's own loader."""
    for _ in DataLoader(Windows(paths), batch_size=LANES, num_workers=WORKERS):
        pass
    return sum(len(decord.VideoReader(path)) for path in paths[:1]) * len(paths)


def throughput(quick: bool) -> Iterator[Row]:
    """Frames a second of everyone."""
    paths = some_clips(quick)

    def timed(run: Callable[[list[str]], int]) -> float:
        begin = time.perf_counter()
        frames = run(paths)
        return frames / (time.perf_counter() - begin)

    contenders: dict[str, Callable[[list[str]], int]] = {
        OURS: ours,
        CONVERTED: partial(without_loader, convert=True),
        DECODED: partial(without_loader, convert=False),
    }
    section = f"{len(paths)} clips 640x360 to {SIZE[1]}x{SIZE[0]}, {LANES} lanes, {WORKERS} workers"
    if decord is not None:
        contenders |= {PEER: peer, TORCH: torch_alone}
    else:
        yield LeftOut(section, f"{PEER}; {TORCH}", "the package decord is not installed")
    runs = {name: partial(timed, contender) for name, contender in contenders.items()}
    figures = take_turns(runs, 2 if quick else 5, "frames", warm_up=not quick)
    yield from (figure(section, name, values, "f/s") for name, values in figures.items())
    for name, least in ((CONVERTED, 0.93), (PEER, 2.0), (TORCH, 1.3)):
        if name in figures:
            yield ratio(section, f"{OURS} / {name}", figures, OURS, name, least, at_most=False)
    yield ratio(section, f"{CONVERTED} / {DECODED}", figures, CONVERTED, DECODED, 0.72, at_most=False)


def seeking(quick: bool) -> list[Result]:
    """From opening a long clip at a random frame to having it; the first one also looks up when frames are shown."""
    minutes, seeks = (1, 12) if quick else (10, 60)
    path = long_clip(minutes)
    stream, rng, times, wrong = VideoStream(), np.random.default_rng(0), [], 0
    length = stream.length(path)
    assert length is not None
    for frame in rng.integers(0, length, seeks).tolist():
        begin = time.perf_counter()
        video = stream(path, start=frame)
        picture = next(iter(video))
        times.append(1e3 * (time.perf_counter() - begin))
        wrong += shown_number(picture) != frame
        video.close()
    section = f"seeking to random frames of {minutes} minutes"
    return [
        figure(section, "open, seek, decode", times, "ms", 60),
        figure(section, "wrong frames", [wrong], "", 0),
    ]


def one_of(lanes: int, paths: list[str]) -> tuple[int, int]:
    """Read some windows in this process; what that takes: bytes and threads."""
    process, out = psutil.Process(), np.zeros((TIME_STEPS, 3, *SIZE), np.uint8)
    streams = [VideoStream(size=SIZE)(paths[i % len(paths)]) for i in range(lanes)]
    for _ in range(4):
        for stream in streams:
            stream.read_into(out)
    return process.memory_info().rss, process.num_threads()


def footprint(quick: bool) -> list[Result]:
    """Return the memory of a lane."""
    paths = some_clips(quick)
    spawn = multiprocessing.get_context("spawn")
    taken = {lanes: in_processes(spawn, one_of, [(lanes, paths)])[0] for lanes in (1, 64)}
    memory, threads = ((taken[64][i] - taken[1][i]) / 63 for i in (0, 1))
    section = "64 lanes of 640x360 in one process, over one lane"
    return [
        figure(section, "resident memory a lane", [memory / 1e6], "MB", 6),
        figure(section, "further threads a lane", [threads], "", 0),
    ]


def colours(quick: bool) -> list[Result]:
    """Signal to noise of what is delivered, against the same computed in double precision."""
    found = []
    for path in some_clips(quick)[:4]:
        with av.open(path) as container:
            expected = [reference(frame, SIZE) for _, frame in zip(range(5), decoded(container), strict=False)]
        video = VideoStream(size=SIZE)(path)
        pictures = itertools.islice(video, len(expected))
        found += [decibels(picture, right) for picture, right in zip(pictures, expected, strict=True)]
        video.close()
    return [figure("colours", "against double precision", found, "dB", 40, at_most=False)]


SECTIONS: dict[str, Section] = {
    "throughput": throughput,
    "seeking": seeking,
    "footprint": footprint,
    "colours": colours,
}


if __name__ == "__main__":
    run(__doc__, SECTIONS)
