"""Pictures of what a loader delivers: `grid_pictures`, all lanes, for a film, and `Filmstrip`, batch beside batch.

Guarantees: memory does not grow with the number of batches, and nothing is drawn into the batch itself.

::

    grid.mp4, one frame a time step        grid.png, the first frame of each window
    +--------+--------+                             batch 4    batch 5    batch 6
    | lane 0 | lane 1 |                    lane 0   clip a     clip a     clip c
    +--------+--------+                             ========   =====      ========   which source at each step
    | lane 2 | lane 3 |                    lane 1   clip b     clip b     clip b
    +--------+--------+                             ========   ========   ========

Batches hold RGB images: `data` is `(T, B, 3, height, width)` uint8 on the CPU. Needs av and OpenCV.
"""

from __future__ import annotations

import colorsys
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray

from stream_dataloader.batch import StreamBatch
from stream_dataloader.streams._media.opencv import import_opencv

cv2 = import_opencv("The demo, which draws,")

Image = NDArray[np.uint8]
Colour = tuple[int, int, int]

FLASH_FRAMES = 6  # how long a lane's border lights up when a new stream starts
GAP = 4  # pixels between two cells
TITLE_HEIGHT = 26  # pixels
LANE_WIDTH = 76  # pixels of the lanes' names, left of a filmstrip
TRACK_HEIGHT = 8  # pixels of the track under a filmstrip's cell
MARGIN_HEIGHT = 14  # pixels from there to the next lane
LEGEND_HEIGHT = 24  # pixels of the line under a filmstrip that says what is what

_BACKGROUND: Colour = (24, 26, 30)
_PADDING: Colour = (128, 128, 128)
_ON_PADDING: Colour = (88, 88, 88)
_TEXT: Colour = (236, 238, 240)
_FLASH: Colour = (255, 255, 255)
_FILM_LEGEND = "white frame: a new stream starts; grey: padding behind a stream's end"
_STRIP_LEGEND = (
    "white frame, white mark: a new stream starts (reset)     coloured bar: which stream, step by step     "
    "grey: padding behind a stream's end"
)
_FONT = cv2.FONT_HERSHEY_SIMPLEX


def write_video(path: Path, pictures: Iterable[Image], frame_rate: int = 25) -> int:
    """Write RGB pictures as an H.264 mp4, each as soon as it comes; returns how many there were.

    Args:
        path: The file; made when the first picture comes.
        pictures: `(height, width, 3)` uint8; sizes are even, and the same for all.
        frame_rate: Pictures a second.
    """
    container, stream, count = None, None, 0
    try:
        for picture in pictures:
            if container is None:
                container = av.open(str(path), "w", format="mp4")
                options = {"crf": "23", "preset": "veryfast"}
                stream = container.add_stream("libx264", rate=frame_rate, options=options)
                stream.height, stream.width = picture.shape[:2]
                stream.pix_fmt = "yuv420p"
            assert stream is not None
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = count, Fraction(1, frame_rate)
            container.mux(stream.encode(frame))
            count += 1
    finally:
        if container is not None and stream is not None:
            container.mux(stream.encode(None))  # what the encoder still holds
            container.close()
    return count


def grid_pictures(batch: StreamBatch, names: Callable[[int], str]) -> Iterator[Image]:
    """All lanes side by side, a picture a time step; each is drawn over the one before.

    Args:
        names: The name to draw for a source, given its index.
    """
    lanes, (height, width) = len(batch), batch.data.shape[-2:]
    columns = math.ceil(math.sqrt(lanes))
    rows = math.ceil(lanes / columns)
    whole = TITLE_HEIGHT + rows * (height + GAP), columns * (width + GAP) + GAP
    canvas = _canvas(*(length + length % 2 for length in whole))  # yuv420p needs even sizes
    for t in range(batch.time_steps):
        canvas[:] = _BACKGROUND
        _write(canvas, f"batch {batch.step}   t = {t}", x=GAP + 4, baseline=TITLE_HEIGHT - 8)
        left = GAP + 28 + _text_width(f"batch {batch.step}   t = 000")
        room = canvas.shape[1] - left - GAP
        _write(canvas, _FILM_LEGEND, x=left, baseline=TITLE_HEIGHT - 9, width=room, scale=0.34, colour=_PADDING)
        for lane in range(lanes):
            top = TITLE_HEIGHT + lane // columns * (height + GAP)
            left = GAP + lane % columns * (width + GAP)
            canvas[top : top + height, left : left + width] = _cell(batch, t, lane, names)
        yield canvas


class Filmstrip:
    """A picture of consecutive batches: each lane is a row that one reads from left to right.

    A cell shows the first frame of a window, and under it a track with a colour for each source, so that a
    source that goes on from one batch to the next is an unbroken line. Of all batches added it keeps those
    in which the most streams start and the least is padding.

    Args:
        names: The name to draw for a source, given its index.
        batches: How many batches to show.
    """

    def __init__(self, names: Callable[[int], str], batches: int = 6) -> None:
        self._names = names
        self._latest: deque[tuple[float, Image]] = deque(maxlen=batches)
        self._best: list[Image] = []
        self._best_score = -math.inf
        self._lanes: Image | None = None

    def add(self, batch: StreamBatch) -> None:
        """Take in the next batch."""
        if self._lanes is None:
            self._lanes = _lane_names(batch)
        # starts in the first column shown are worth nothing: what went on before is not seen
        score = float(batch.is_start.sum()) - float((batch.source < 0).sum()) / batch.time_steps
        self._latest.append((score, _column(batch, self._names)))
        total = sum(score for score, _ in list(self._latest)[1:])
        if len(self._latest) > len(self._best) or total > self._best_score:
            self._best, self._best_score = [column for _, column in self._latest], total

    def image(self) -> Image:
        """The picture, (height, width, 3) RGB."""
        if self._lanes is None:
            return _canvas(TITLE_HEIGHT, LANE_WIDTH)
        strip = np.concatenate([self._lanes, *self._best], axis=1)
        legend = _canvas(LEGEND_HEIGHT, strip.shape[1])
        _write(legend, _STRIP_LEGEND, x=8, baseline=LEGEND_HEIGHT - 9, width=strip.shape[1] - 16)
        return np.concatenate([strip, legend], axis=0)

    def save(self, path: Path) -> None:
        """Write the picture as a PNG.

        Raises:
            OSError: It cannot be written.
        """
        _, encoded = cv2.imencode(".png", cv2.cvtColor(self.image(), cv2.COLOR_RGB2BGR))
        path.write_bytes(encoded.tobytes())


def _canvas(height: int, width: int) -> Image:
    """An empty picture."""
    return np.full((height, width, 3), _BACKGROUND, np.uint8)


def _cell(batch: StreamBatch, t: int, lane: int, names: Callable[[int], str]) -> Image:
    """One lane at one time step."""
    source, position = int(batch.source[t, lane]), int(batch.position[t, lane])
    image: Image = batch.data[t, lane].permute(1, 2, 0).numpy().copy(order="C")
    height, width = image.shape[:2]
    if source < 0:
        image[:] = _PADDING
        x = max(0, width - _text_width("padding")) // 2
        _write(image, "padding", x=x, baseline=height // 2 + 4, width=width, colour=_ON_PADDING)
        return image
    band = image[-24:]
    band[:] = band // 3  # darker, so that the name can be read on any picture
    count = str(position)
    count_width = _text_width(count)
    _write(image, count, x=width - count_width - 10, baseline=height - 9)
    _write(image, names(source), x=10, baseline=height - 9, width=width - count_width - 28)
    if position < FLASH_FRAMES:
        thickness = 2 * (1 + max(3, height // 40) * (FLASH_FRAMES - position) // FLASH_FRAMES)
        cv2.rectangle(image, (0, 0), (width - 1, height - 1), _FLASH, thickness)
    return image


def _column(batch: StreamBatch, names: Callable[[int], str]) -> Image:
    """One batch of a filmstrip."""
    lanes, (height, width) = len(batch), batch.data.shape[-2:]
    pitch = height + TRACK_HEIGHT + MARGIN_HEIGHT
    column = _canvas(TITLE_HEIGHT + lanes * pitch, width + GAP)
    _write(column, f"batch {batch.step}", x=4, baseline=TITLE_HEIGHT - 8, width=width)
    for lane in range(lanes):
        top = TITLE_HEIGHT + lane * pitch
        column[top : top + height, :width] = _cell(batch, 0, lane, names)
        _draw_track(column[top + height + 2 : top + height + 2 + TRACK_HEIGHT], batch, lane)
    return column


def _draw_track(track: Image, batch: StreamBatch, lane: int) -> None:
    """Which source the lane reads at each time step, with a white mark where a stream starts."""
    edges = np.linspace(0, track.shape[1], batch.time_steps + 1).astype(int)
    sources, starts = batch.source[:, lane].tolist(), batch.is_start[:, lane].tolist()
    for left, right, source, start in zip(edges, edges[1:], sources, starts, strict=False):
        track[:, left:right] = _PADDING if source < 0 else source_colour(source)
        if start:
            track[:, left : left + 3] = _FLASH


def source_colour(source: int) -> Colour:
    """The colour of a source's track; differs from those of the sources before and after."""
    red, green, blue = colorsys.hsv_to_rgb(source * 0.618034 % 1, 0.62, 0.92)
    return round(255 * red), round(255 * green), round(255 * blue)


def _lane_names(batch: StreamBatch) -> Image:
    """The left edge of a filmstrip."""
    height = batch.data.shape[-2]
    pitch = height + TRACK_HEIGHT + MARGIN_HEIGHT
    edge = _canvas(TITLE_HEIGHT + len(batch) * pitch, LANE_WIDTH)
    for row, (lane, worker) in enumerate(zip(batch.lane.tolist(), batch.worker_id.tolist(), strict=True)):
        middle = TITLE_HEIGHT + row * pitch + height // 2
        _write(edge, f"lane {lane}", x=8, baseline=middle - 3)
        _write(edge, f"worker {worker}", x=8, baseline=middle + 14, scale=0.36)
    return edge


def _text_width(text: str, scale: float = 0.42) -> int:
    return int(cv2.getTextSize(text, _FONT, scale, 1)[0][0])


def _write(
    image: Image,
    text: str,
    *,
    x: int,
    baseline: int,
    width: int | None = None,
    scale: float = 0.42,
    colour: Colour = _TEXT,
) -> None:
    """Draw `text`, shortened in the middle to fit into `width` pixels."""
    text = text.encode("ascii", "replace").decode()  # the font has no more
    shown, kept = text, len(text)
    while width is not None and kept > 0 and _text_width(shown, scale) > width:
        kept -= 1
        shown = text[: (kept + 1) // 2] + ".." + text[len(text) - kept // 2 :] if kept else ""
    cv2.putText(image, shown, (x, baseline), _FONT, scale, colour, 1, cv2.LINE_AA)
