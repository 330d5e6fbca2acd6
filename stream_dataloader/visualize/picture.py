"""Timeline of an epoch as text, and as a picture drawn by matplotlib.

Guarantees: no line of text exceeds the requested width; the same timeline always gives the same picture.

The colours can be told apart by colour-blind people (Okabe and Ito 2008). Neighbours in a lane never share a colour.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import io
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

import numpy as np

from stream_dataloader._engine.html import page, preformatted
from stream_dataloader._engine.schedule.forecast import Alternative, Forecast
from stream_dataloader.errors import shown

__all__ = ["Timeline"]

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_LEAST_WIDTH = 40  # characters
_MOST_DRAWN = 500  # segments in a picture that a notebook keeps

_COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#CC79A7", "#0072B2", "#D55E00")
_DARK_COLOURS = {"#0072B2", "#009E73", "#D55E00"}  # for white letters
_THEMES = {  # ground, ink, padding
    "light": ("#ffffff", "#222222", "#d9d9d9"),
    "dark": ("#16181d", "#e6e6e6", "#3a3d45"),
}
_BAR = 0.84  # of a lane's height


class Segment(NamedTuple):
    """Consecutive time steps of one stream in a lane.

    Attributes:
        lane: The lane.
        start: First time step, counted over the epoch: step * T + t.
        stop: One past the last time step.
        source: Index of the stream's source.
        position: Index of the first time step within its stream.
        starts: Whether the stream starts here, which resets the lane's state.
        fresh: Whether the stream is read for the first time in this epoch.
    """

    lane: int
    start: int
    stop: int
    source: int
    position: int
    starts: bool
    fresh: bool


@dataclass(frozen=True)
class Timeline:
    """Streams of each lane over time. `print` shows text, and notebooks show a picture.

    Attributes:
        segments: Runs of time steps that lanes read, ordered by lane and time: lane, start, stop, source, position,
            starts, fresh. Time steps count over the epoch. Gaps between runs are padding.
        lanes: Number of lanes, B.
        batches: Number of batches.
        time_steps: Time steps of the longest window, T.
        workers: Lanes of each worker.
    """

    segments: tuple[Segment, ...] = dataclasses.field(repr=False)
    lanes: int
    batches: int
    time_steps: int
    workers: tuple[range, ...]
    _forecast: Forecast | None = dataclasses.field(default=None, repr=False, compare=False)

    @functools.cached_property
    def alternatives(self) -> tuple[Alternative, ...]:
        """Options that would leave less padding, the best first; computed when first read."""
        return () if self._forecast is None else tuple(self._forecast.alternatives)

    @property
    def padding_share(self) -> float:
        """Share of all cells that is padding, 0 to 1."""
        cells = self.lanes * self.batches * self.time_steps
        read = sum(segment.stop - segment.start for segment in self.segments)
        return 1 - read / cells if cells else 0.0

    @property
    def streams(self) -> int:
        """Number of streams that start."""
        return sum(segment.starts for segment in self.segments)

    def _summary(self) -> str:
        made = f"{self.batches} batches of {self.time_steps} time steps"
        return f"{made}, {self.lanes} lanes, {self.streams} streams, padding {self.padding_share:.1%}"

    def text(self, width: int = 100) -> str:
        """Return text for a terminal, with a letter for each stream and a capital at its first time step.

        Dots are padding. A character that stands for several time steps shows a start if one is among them, else the
        first of them.

        Args:
            width: Width of a line in characters, at least 40.
        """
        several = len(self.workers) > 1
        margin = 10 + 12 * several
        room = max(width, _LEAST_WIDTH) - margin
        cells = self.batches * self.time_steps
        scale = max(1, -(-cells // room))
        columns = -(-cells // scale)
        drawn = np.full((self.lanes, columns), "·")
        letters = [_LETTERS[segment.source % len(_LETTERS)] for segment in self.segments]
        for letter, segment in zip(letters, self.segments, strict=True):
            begin = -(-segment.start // scale)
            stop = -(-segment.stop // scale)
            drawn[segment.lane, begin:stop] = letter
        for letter, segment in zip(letters, self.segments, strict=True):
            if segment.starts:
                drawn[segment.lane, segment.start // scale] = letter.upper()
        ruler = ""
        for step in range(self.batches):
            at = step * self.time_steps // scale
            if at >= len(ruler) + bool(ruler) and at + len(str(step)) <= columns:
                ruler = ruler.ljust(at) + str(step)
        title = self._summary()
        if scale > 1:
            title += f"; a character is {scale} time steps"
        lines = [title, " " * margin + ruler]
        heads = {lanes.start: f"worker {worker}" for worker, lanes in enumerate(self.workers)}
        for lane, row in enumerate(drawn):
            head = heads.get(lane, "").ljust(12) if several else ""
            lines.append((head + f"lane {lane}").ljust(margin) + "".join(row))
        if self.alternatives:
            others = ", ".join(map(str, self.alternatives))
            lines += textwrap.wrap(f"padding would be {others}", margin + room)
        return "\n".join(line.rstrip() for line in lines)

    def save(
        self,
        path: str | os.PathLike[str] | IO[bytes],
        *,
        theme: str = "light",
        sources: Sequence[Any] | Mapping[int, Any] | None = None,
    ) -> None:
        """Draw the timeline with matplotlib: one colour for each stream, resets marked, padding grey.

        Args:
            path: Path of a `.png`, `.svg` or `.pdf` file, or an open file, to which a PNG is written.
            theme: `"light"` or `"dark"`.
            sources: Names of streams by index; None shows the index.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: The theme is unknown.
        """
        _figure(self, theme, sources).savefig(path, dpi=150)

    def __str__(self) -> str:
        return self.text()

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """Return a picture for a notebook, or the text if the picture would be too large."""
        if len(self.segments) > _MOST_DRAWN or importlib.util.find_spec("matplotlib") is None:
            return {"text/html": page(lambda: preformatted(self.text()), self.__repr__)}
        from matplotlib import rc_context

        file = io.StringIO()
        with rc_context({"svg.hashsalt": "timeline", "svg.fonttype": "none"}):  # the same each time
            _figure(self, "light", None).savefig(file, format="svg", metadata={"Date": None})
        text = file.getvalue()
        return {"image/svg+xml": text[text.index("<svg") :]}


def _figure(timeline: Timeline, theme: str, sources: Any) -> Any:
    if theme not in _THEMES:
        raise ValueError(f'theme is {theme!r}; use "light" or "dark"')
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        remedy = "pip install 'stream-dataloader[plot]'"
        raise ImportError(f"pictures of timelines need matplotlib: {remedy}") from error
    ground, ink, padding = _THEMES[theme]
    lanes = timeline.lanes
    width = max(timeline.batches * timeline.time_steps, 1)
    row_inches = 0.34 if lanes <= 16 else max(0.11, 5.5 / lanes)
    height = 1.2 + row_inches * lanes
    left = 0.125 if len(timeline.workers) > 1 else 0.075
    figure = Figure(figsize=(11, height), facecolor=ground)
    place = (left, 0.62 / height, 0.985 - left, 1 - 1.14 / height)
    axes = figure.add_axes(place, facecolor=ground)
    axes.barh(range(lanes), width, _BAR, color=padding)
    segments = timeline.segments
    colours = _colours(segments)
    lengths = [segment.stop - segment.start for segment in segments]
    begins = [segment.start for segment in segments]
    axes.barh([segment.lane for segment in segments], lengths, _BAR, begins, color=colours)
    for segment, steps, colour in zip(segments, lengths, colours, strict=True):
        if segment.starts:
            top = segment.lane - _BAR / 2
            axes.vlines(segment.start, top, top + _BAR, color=ink, linewidth=1.6)
        name = shown(segment.source if sources is None else sources[segment.source])
        inches = steps / width * 9.6
        if row_inches >= 0.2 and inches >= 0.09 * len(name) + 0.08:  # there is room
            at = segment.start + steps / 2, segment.lane
            letters = "#ffffff" if colour in _DARK_COLOURS else "#111111"
            how: dict[str, Any] = {"ha": "center", "va": "center", "color": letters, "fontsize": 8}
            axes.text(*at, name, clip_on=True, parse_math=False, **how)
    _frame(axes, timeline, width, ground)
    axes.tick_params(colors=ink, labelsize=8, length=2)
    axes.set_xlabel("batch", color=ink, fontsize=9)
    axes.set_ylabel("lane", color=ink, fontsize=9, loc="top", rotation=0, labelpad=0)
    title = f"{timeline._summary()} (grey); a bar marks a reset"
    axes.set_title(title, color=ink, fontsize=10, loc="left")
    return figure


def _colours(segments: Sequence[Segment]) -> list[str]:
    found: list[str] = []
    for before, segment in zip([None, *segments], segments, strict=False):
        number = segment.source % len(_COLOURS)
        if before is not None and before.lane == segment.lane and found[-1] == _COLOURS[number]:
            number = (number + 1 + (before.source == segment.source)) % len(_COLOURS)
        found.append(_COLOURS[number])
    return found


def _frame(axes: Any, timeline: Timeline, width: int, line: str) -> None:
    if timeline.batches <= 200:
        for step in range(1, timeline.batches):
            axes.axvline(step * timeline.time_steps, color=line, linewidth=0.5, zorder=3)
    axes.set_xlim(0, width)
    axes.set_ylim(timeline.lanes - 0.4, -0.6)
    every = max(1, -(-timeline.batches // 20))
    shown = range(0, timeline.batches + 1, every)
    axes.set_xticks([step * timeline.time_steps for step in shown], map(str, shown))
    every = max(1, -(-timeline.lanes // 32))
    names = {lane: str(lane) for lane in range(0, timeline.lanes, every)}
    if len(timeline.workers) > 1:
        names |= {own.start: f"worker {worker}   {own.start}" for worker, own in enumerate(timeline.workers)}
    axes.set_yticks(list(names), list(names.values()))
    axes.spines[:].set_visible(False)
