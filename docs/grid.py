"""Draws the moving picture at the top of the README: what four lanes deliver in the first eight batches.

    python docs/grid.py [PATH]

Writes `docs/assets/grid.gif` by default. It reads the demo's clips with the library: all that is shown
is in the batches. Few colours keep the file small.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path

import av
import cv2
import numpy as np
from numpy.typing import NDArray
from stream_dataloader import StreamBatch, StreamDataLoader, StreamDataset
from stream_dataloader.cli.demo import default_clips
from stream_dataloader.streams import VideoStream

LANES, TIME_STEPS, BATCHES = 4, 8, 8
FRAMES_PER_SECOND, COLOURS = 10, 128
HEIGHT, WIDTH = 84, 112  # of the frame that a lane is at
# pixels: where frames and batches begin, a time step, a row
LEFT, TRACK, TOP = 70, 200, 34
STEP, GAP, ROW = 9, 6, HEIGHT + 16
CELL = TIME_STEPS * STEP
BACKGROUND, NOW, PADDING, TEXT, SOFT = (
    (24, 26, 30),
    (52, 56, 66),
    (128, 128, 128),
    (236, 238, 240),
    (150, 156, 166),
)
NEW_FOR = 3  # time steps that a new stream has a white frame

Image = NDArray[np.uint8]


def write(image: Image, text: str, x: int, y: int, colour: tuple[int, int, int] = TEXT) -> None:
    """Write text, its baseline at y."""
    cv2.putText(image, text, (x, y), cv2.FONT_HERSHEY_DUPLEX, 0.45, colour, 1, cv2.LINE_AA)


def frame_of(batch: StreamBatch, t: int, lane: int) -> Image:
    """The frame of a lane at a time step; grey where that is padding."""
    if batch.is_padding[t, lane]:
        return np.full((HEIGHT, WIDTH, 3), PADDING, np.uint8)
    return np.ascontiguousarray(batch.data[t, lane].permute(1, 2, 0).numpy())


def bar_colour(batch: StreamBatch, t: int, lane: int) -> tuple[int, int, int]:
    """The colour of the clip's shape: another for each stream."""
    if batch.is_padding[t, lane]:
        return PADDING
    hue = int(batch.source_index[t, lane]) * 0.618034 % 1 * 180
    red, green, blue = cv2.cvtColor(np.uint8([[[hue, 158, 235]]]), cv2.COLOR_HSV2RGB)[0, 0]
    return int(red), int(green), int(blue)


def draw_cell(image: Image, batch: StreamBatch, lane: int, steps: int) -> None:
    """What a lane has added to a batch: its first frame, and a bar that grows by time steps."""
    x, y = TRACK + batch.batch_index * (CELL + GAP), TOP + lane * ROW
    height = CELL * HEIGHT // WIDTH
    small = cv2.resize(frame_of(batch, 0, lane), (CELL, height), interpolation=cv2.INTER_AREA)
    image[y + 6 : y + 6 + height, x : x + CELL] = small
    for t in range(steps):
        left, top = x + t * STEP, y + height + 10
        cv2.rectangle(
            image, (left, top), (left + STEP - 1, top + 9), bar_colour(batch, t, lane), -1
        )
        if batch.is_first[t, lane]:
            cv2.rectangle(image, (left, y + 4), (left + 2, top + 11), TEXT, -1)


def pictures(batches: list[StreamBatch], names: list[str]) -> Iterator[Image]:
    """A picture a time step."""
    size = TOP + LANES * ROW, TRACK + BATCHES * (CELL + GAP) + GAP, 3
    for batch, t in itertools.product(batches, range(TIME_STEPS)):
        image = np.full(size, BACKGROUND, np.uint8)
        now = TRACK + batch.batch_index * (CELL + GAP) - GAP // 2
        image[:, now : now + CELL + GAP] = NOW
        for number in range(BATCHES):
            x = TRACK + number * (CELL + GAP)
            write(
                image, f"batch {number}", x + 6, 22, TEXT if number == batch.batch_index else SOFT
            )
        for lane in range(LANES):
            y = TOP + lane * ROW
            write(image, f"lane {lane}", 10, y + HEIGHT // 2 + 4)
            image[y : y + HEIGHT, LEFT : LEFT + WIDTH] = frame_of(batch, t, lane)
            if not batch.is_padding[t, lane]:
                name = names[int(batch.source_index[t, lane])]
                image[y + HEIGHT - 18 : y + HEIGHT, LEFT : LEFT + WIDTH] //= 3
                cv2.putText(
                    image,
                    name,
                    (LEFT + 4, y + HEIGHT - 6),
                    cv2.FONT_HERSHEY_DUPLEX,
                    0.36,
                    TEXT,
                    1,
                    cv2.LINE_AA,
                )
                if batch.position[t, lane] < NEW_FOR:
                    cv2.rectangle(image, (LEFT, y), (LEFT + WIDTH - 1, y + HEIGHT - 1), TEXT, 3)
            for earlier in batches[: batch.batch_index]:
                draw_cell(image, earlier, lane, TIME_STEPS)
            draw_cell(image, batch, lane, t + 1)
        yield image


def write_gif(path: Path, images: Iterable[Image]) -> None:
    """Write a GIF that repeats, with one palette for all pictures."""
    images = list(images)
    height, width = images[0].shape[:2]
    graph = av.filter.Graph()
    source = graph.add_buffer(
        width=width, height=height, format="rgb24", time_base=Fraction(1, FRAMES_PER_SECOND)
    )
    split, palette = (
        graph.add("split"),
        graph.add("palettegen", f"max_colors={COLOURS}:stats_mode=full"),
    )
    use, sink = graph.add("paletteuse", "dither=none:diff_mode=rectangle"), graph.add("buffersink")
    source.link_to(split)
    split.link_to(palette, 0, 0)
    split.link_to(use, 1, 0)
    palette.link_to(use, 0, 1)
    use.link_to(sink)
    graph.configure()
    with av.open(str(path), "w", format="gif", options={"final_delay": "250"}) as container:
        stream = container.add_stream("gif", rate=FRAMES_PER_SECOND)
        stream.width, stream.height, stream.pix_fmt = width, height, "pal8"
        for number, image in enumerate(images):
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, FRAMES_PER_SECOND)
            source.push(frame)
        source.push(None)
        for number in range(len(images)):
            frame = sink.pull()
            frame.pts, frame.time_base = number, Fraction(1, FRAMES_PER_SECOND)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def main() -> None:
    """Read the clips, and write the picture."""
    parser = argparse.ArgumentParser(description="Draws the README's moving picture.")
    parser.add_argument(
        "path", nargs="?", type=Path, default=Path(__file__).parent / "assets" / "grid.gif"
    )
    path = parser.parse_args().path
    clips = default_clips()
    frames = VideoStream(size=(HEIGHT, WIDTH), frame_step=2)
    dataset = StreamDataset(clips, frames, LANES, time_steps=TIME_STEPS)
    with_workers = StreamDataLoader(dataset, num_workers=2)
    batches = list(itertools.islice(with_workers, BATCHES))
    write_gif(path, pictures(batches, [clip.stem[3:] for clip in clips]))


if __name__ == "__main__":
    main()
