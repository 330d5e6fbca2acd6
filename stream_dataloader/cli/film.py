"""Pictures of batches of video: all lanes side by side, or batch beside batch.

The `data` of batches is `(T, B, 3, height, width)` uint8 on the CPU.
Guarantees: memory does not grow with the number of batches, and no batch is changed.
"""

from __future__ import annotations

import colorsys
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray

from stream_dataloader.batch import StreamBatch
from stream_dataloader.errors import shown as made_visible
from stream_dataloader.streams._media.opencv import import_opencv

cv2 = import_opencv("The demo, which draws,")

Image = NDArray[np.uint8]
Colour = tuple[int, int, int]
Names = Callable[[int], str]

FLASH_FRAMES = 6  # frames for which a border lights up
# pixels
GAP = 4
TITLE_HEIGHT = 26
LANE_WIDTH = 76
TRACK_HEIGHT = 8
MARGIN_HEIGHT = 14
LEGEND_HEIGHT = 24
CLIP_RATE = 25
_CLIP_WIDTH, _CLIP_HEIGHT = 320, 240

_BACKGROUND: Colour = (24, 26, 30)
_PADDING: Colour = (128, 128, 128)
_TEXT: Colour = (236, 238, 240)
_FLASH: Colour = (255, 255, 255)
_GRID_LEGEND = "white frame: a new stream; grey: padding"
_LEGEND = (
    "white frame, white mark: a new stream starts (reset)     "
    "coloured bar: the stream of each time step     "
    "grey: padding behind a stream's end"
)


def write_video(path: Path, pictures: Iterable[Image], frame_rate: int = 25) -> None:
    """Write RGB pictures of one even size as an H.264 mp4. Without pictures no file is written."""
    pictures = iter(pictures)
    if (first := next(pictures, None)) is None:
        return
    options = {"crf": "23", "preset": "veryfast"}
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=frame_rate, options=options)
        stream.height, stream.width = first.shape[:2]
        stream.pix_fmt = "yuv420p"
        try:
            for count, picture in enumerate(itertools.chain([first], pictures)):
                frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
                frame.pts, frame.time_base = count, Fraction(1, frame_rate)
                container.mux(stream.encode(frame))
        finally:
            container.mux(stream.encode(None))  # what the encoder still holds


def grid_pictures(batch: StreamBatch, names: Names) -> Iterator[Image]:
    """Yield a picture of all lanes side by side for each time step. All are drawn into the same memory."""
    lanes, (height, width) = len(batch), batch.data.shape[-2:]
    columns = math.ceil(math.sqrt(lanes))
    rows = math.ceil(lanes / columns)
    whole = TITLE_HEIGHT + rows * (height + GAP), columns * (width + GAP) + GAP
    canvas = _canvas(*(length + length % 2 for length in whole))  # yuv420p needs even sizes
    for t in range(batch.time_steps):
        title = f"batch {batch.batch_index}   t = {t:<3}   {_GRID_LEGEND}"
        canvas[:] = _BACKGROUND
        _write(canvas, title, 8, TITLE_HEIGHT - 8)
        for lane in range(lanes):
            top = TITLE_HEIGHT + lane // columns * (height + GAP)
            left = GAP + lane % columns * (width + GAP)
            canvas[top : top + height, left : left + width] = _cell(batch, t, lane, names)
        yield canvas


class Filmstrip:
    """Picture of consecutive batches, chosen so that many streams start in them."""

    def __init__(self, names: Names, batches: int = 6) -> None:
        self._names = names
        self._latest: deque[tuple[float, Image]] = deque(maxlen=batches)
        self._best: list[Image] = []
        self._best_score = -math.inf

    def add(self, batch: StreamBatch) -> None:
        if not self._best:
            self._edge = _edge(batch)
        padding = float(batch.is_padding.sum()) / batch.time_steps
        score = float(batch.is_first.sum()) - padding
        self._latest.append((score, _column(batch, self._names)))
        total = sum(score for score, _ in list(self._latest)[1:])
        if len(self._latest) > len(self._best) or total > self._best_score:
            self._best = [column for _, column in self._latest]
            self._best_score = total

    def image(self) -> Image:
        """Return the picture of at least one batch, `(height, width, 3)` RGB."""
        strip = np.concatenate([self._edge, *self._best], axis=1)
        legend = _canvas(LEGEND_HEIGHT, strip.shape[1])
        _write(legend, _LEGEND, 8, LEGEND_HEIGHT - 9)
        return np.concatenate([strip, legend])

    def save(self, path: Path) -> None:
        _, encoded = cv2.imencode(".png", np.ascontiguousarray(self.image()[..., ::-1]))
        path.write_bytes(encoded.tobytes())


def _canvas(height: int, width: int, colour: Colour = _BACKGROUND) -> Image:
    return np.full((height, width, 3), colour, np.uint8)


def _cell(batch: StreamBatch, t: int, lane: int, names: Names) -> Image:
    source, position = int(batch.source_index[t, lane]), int(batch.position[t, lane])
    image: Image = batch.data[t, lane].permute(1, 2, 0).numpy().copy(order="C")
    height, width = image.shape[:2]
    if source < 0:
        return _canvas(height, width, _PADDING)
    image[-24:] //= 3  # darker, below the name
    count = str(position)
    right = width - _text_width(count) - 10
    _write(image, count, right, height - 9)
    _write(image, names(source), 10, height - 9, right - 8)
    if position < FLASH_FRAMES:
        thickness = 2 * (1 + max(3, height // 40) * (FLASH_FRAMES - position) // FLASH_FRAMES)
        cv2.rectangle(image, (0, 0), (width - 1, height - 1), _FLASH, thickness)
    return image


def _column(batch: StreamBatch, names: Names) -> Image:
    height, width = batch.data.shape[-2:]
    pitch = height + TRACK_HEIGHT + MARGIN_HEIGHT
    column = _canvas(TITLE_HEIGHT + len(batch) * pitch, width + GAP)
    _write(column, f"batch {batch.batch_index}", 4, TITLE_HEIGHT - 8, width)
    edges = np.linspace(0, width, batch.time_steps + 1).astype(int)
    for lane in range(len(batch)):
        top = TITLE_HEIGHT + lane * pitch
        column[top : top + height, :width] = _cell(batch, 0, lane, names)
        track = column[top + height + 2 :][:TRACK_HEIGHT, :width]
        for t, (left, right) in enumerate(itertools.pairwise(edges)):
            source = int(batch.source_index[t, lane])
            track[:, left:right] = _PADDING if source < 0 else _source_colour(source)
            if batch.is_first[t, lane]:
                track[:, left : left + 3] = _FLASH
    return column


def _source_colour(source: int) -> Colour:
    red, green, blue = colorsys.hsv_to_rgb(source * 0.618034 % 1, 0.62, 0.92)
    return round(255 * red), round(255 * green), round(255 * blue)


def _edge(batch: StreamBatch) -> Image:
    height = batch.data.shape[-2]
    pitch = height + TRACK_HEIGHT + MARGIN_HEIGHT
    edge = _canvas(TITLE_HEIGHT + len(batch) * pitch, LANE_WIDTH)
    for row, (lane, worker) in enumerate(zip(batch.lane, batch.worker_id, strict=True)):
        middle = TITLE_HEIGHT + row * pitch + height // 2
        _write(edge, f"lane {lane}", 8, middle - 3)
        _write(edge, f"worker {worker}", 8, middle + 14)
    return edge


def _text_width(text: str) -> int:
    return int(cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, 0.42, 1)[0][0])


def _write(image: Image, text: str, left: int, baseline: int, right: int | None = None) -> None:
    """Draw text, shortened in the middle to end before `right`."""
    room = (right or image.shape[1]) - left
    # Each character takes a pixel at least: a long name is not measured again and again.
    text = text if len(text) <= room else f"{text[: (room + 1) // 2]}{text[len(text) - room // 2 :]}"
    text = made_visible(text).encode("ascii", "replace").decode()  # the font has no more
    shown, kept = text, len(text)
    while kept > 0 and _text_width(shown) > room:
        kept -= 1
        shown = text[: (kept + 1) // 2] + ".." + text[len(text) - kept // 2 :] if kept else ""
    font = cv2.FONT_HERSHEY_SIMPLEX
    cv2.putText(image, shown, (left, baseline), font, 0.42, _TEXT, 1, cv2.LINE_AA)


def clip_pictures(number: int, frames: int, corners: int, turns: tuple[int, int]) -> Iterator[Image]:
    """Yield pictures of a shape that turns on a closed curve, with a fading trail."""
    colour = _source_colour(number)
    shade = np.linspace(0.10, 0.26, _CLIP_HEIGHT)[:, None, None] * np.array(colour)
    ground = np.repeat(shade, _CLIP_WIDTH, axis=1).astype(np.uint8)
    angles = 2 * math.pi * np.arange(corners or 64) / (corners or 64)
    radii = np.full((len(angles), 1), 34.0)
    if corners == 10:
        radii[::2], radii[1::2] = 42.0, 18.0
    for frame in range(frames):
        image = ground
        for age in range(8, -1, -1):
            phase = 2 * math.pi * (frame / CLIP_RATE - 0.06 * age) / 8
            x, y = math.sin(turns[0] * phase + 0.4), math.sin(turns[1] * phase + 1.1)
            centre = (0.36 * x + 0.5) * _CLIP_WIDTH, (0.28 * y + 0.44) * _CLIP_HEIGHT
            turned = 4 * phase + angles
            outline = centre + radii * np.stack([np.sin(turned), -np.cos(turned)], axis=1)
            layer = image.copy()
            points = np.round(16 * outline).astype(np.int32)
            cv2.fillPoly(layer, [points], colour, cv2.LINE_AA, shift=4)
            if age:
                layer = np.asarray(cv2.addWeighted(layer, 0.14, image, 0.86, 0), np.uint8)
            image = layer
        yield image
