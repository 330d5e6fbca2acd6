"""A timeline as a picture, by matplotlib.

Colours are Okabe and Ito's (2008, https://jfly.uni-koeln.de/color/), which colour-blind people tell apart; a stream
keeps one, and neighbours in a lane never share one.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from stream_dataloader.visualize.assignment import Assignment, Segment

__all__ = ["save_figure", "svg_of"]

_COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#CC79A7", "#0072B2", "#D55E00")
_THEMES = {
    "light": {"ground": "#ffffff", "ink": "#222222", "padding": "#d9d9d9", "mark": "#000000", "grid": "#ffffff"},
    "dark": {"ground": "#16181d", "ink": "#e6e6e6", "padding": "#3a3d45", "mark": "#ffffff", "grid": "#16181d"},
}
_BAR = 0.84  # of a lane's height
_DARK_COLOURS = {"#0072B2", "#009E73", "#D55E00"}  # on which white letters are read best


def save_figure(timeline: Assignment, path: Any, theme: str, sources: Sequence[Any] | None) -> None:
    """See `Timeline.save`."""
    figure = _drawn(timeline, theme, sources)
    figure.savefig(path, facecolor=_THEMES[theme]["ground"], dpi=150)


def svg_of(timeline: Assignment) -> str:
    """The picture as a part of a page, the same each time."""
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.hashsalt": "timeline", "svg.fonttype": "none"}):
        _drawn(timeline, "light", None).savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]


def _drawn(timeline: Assignment, theme: str, sources: Sequence[Any] | None) -> Any:
    if theme not in _THEMES:
        raise ValueError(f'theme is {theme!r}; use "light" or "dark"')
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures of timelines need matplotlib: pip install 'stream-dataloader[plot]'") from error
    tone = _THEMES[theme]
    row_inches = 0.34 if timeline.lanes <= 16 else max(0.11, 5.5 / timeline.lanes)
    height = 1.2 + row_inches * timeline.lanes
    figure = Figure(figsize=(11, height), facecolor=tone["ground"])
    FigureCanvasAgg(figure)
    several = len(timeline.workers) > 1
    left = 0.125 if several else 0.075
    axes = figure.add_axes((left, 0.62 / height, 0.985 - left, 1 - 1.14 / height), facecolor=tone["ground"])
    width = max(timeline.steps * timeline.time_steps, 1)
    axes.barh(range(timeline.lanes), width, _BAR, color=tone["padding"])
    colours, segments = _colours(timeline.segments), timeline.segments
    lanes, lengths = [one.lane for one in segments], [one.stop - one.begin for one in segments]
    axes.barh(lanes, lengths, _BAR, [one.begin for one in segments], color=list(map(colours.__getitem__, segments)))
    for segment in segments:
        if segment.starts:
            top, bottom = segment.lane - _BAR / 2, segment.lane + _BAR / 2
            axes.vlines(segment.begin, top, bottom, color=tone["mark"], linewidth=1.6)
        _label(axes, segment, colours[segment], width, row_inches, sources)
    _edges(axes, timeline, width, tone)
    if several:
        _brackets(axes, timeline, tone, row_inches)
    title = (
        f"{timeline.steps} batches of {timeline.time_steps} time steps, {timeline.lanes} lanes, {timeline.streams} "
        f"streams; padding (grey) {timeline.padding_share:.1%}; a bar marks a reset"
    )
    axes.set_title(title, color=tone["ink"], fontsize=10, loc="left")
    return figure


def _colours(segments: Sequence[Segment]) -> dict[Segment, str]:
    """One colour a stream, and another than that of the stream before it in the lane."""
    found: dict[Segment, str] = {}
    before: Segment | None = None
    for segment in segments:
        number = segment.source % len(_COLOURS)
        if before is not None and before.lane == segment.lane and found[before] == _COLOURS[number]:
            number = (number + 1 + (before.source == segment.source)) % len(_COLOURS)
        found[segment] = _COLOURS[number]
        before = segment
    return found


def _label(
    axes: Any, segment: Segment, colour: str, width: int, row_inches: float, sources: Sequence[Any] | None
) -> None:
    """The stream's name, where there is room for it."""
    if row_inches < 0.2:
        return
    name = str(segment.source if sources is None else sources[segment.source])
    inches = (segment.stop - segment.begin) / width * 9.6
    if inches < 0.09 * len(name) + 0.08:
        return
    ink = "#ffffff" if colour in _DARK_COLOURS else "#111111"
    axes.text(
        (segment.begin + segment.stop) / 2,
        segment.lane,
        name,
        ha="center",
        va="center",
        color=ink,
        fontsize=8,
        clip_on=True,
    )


def _edges(axes: Any, timeline: Assignment, width: int, tone: dict[str, str]) -> None:
    every = max(1, -(-timeline.steps // 20))
    shown = range(0, timeline.steps + 1, every)
    if timeline.steps <= 200:
        for step in range(1, timeline.steps):
            axes.axvline(step * timeline.time_steps, color=tone["grid"], linewidth=0.5, zorder=3)
    axes.set_xlim(0, width)
    axes.set_ylim(timeline.lanes - 0.4, -0.6)
    axes.set_xticks([step * timeline.time_steps for step in shown], [str(step) for step in shown])
    rows = max(1, -(-timeline.lanes // 32))
    lanes = range(0, timeline.lanes, rows)
    axes.set_yticks(list(lanes), [str(lane) for lane in lanes])
    axes.set_xlabel("batch", color=tone["ink"], fontsize=9)
    axes.text(-0.008, 1.0, "lane", ha="right", va="bottom", color=tone["ink"], fontsize=9, transform=axes.transAxes)
    axes.tick_params(colors=tone["ink"], labelsize=8, length=2)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _brackets(axes: Any, timeline: Assignment, tone: dict[str, str], row_inches: float) -> None:
    """A bracket around each worker's lanes, left of the axis' numbers."""
    at = -0.055
    transform = axes.get_yaxis_transform()
    small = min(map(len, timeline.workers)) * row_inches < 0.55  # no room for "worker 0", upright
    for worker, lanes in enumerate(timeline.workers):
        top, bottom = lanes[0] - 0.35, lanes[-1] + 0.35
        axes.plot(
            [at + 0.006, at, at, at + 0.006],
            [top, top, bottom, bottom],
            color=tone["ink"],
            linewidth=1,
            transform=transform,
            clip_on=False,
        )
        name = f"{worker}" if small else f"worker {worker}"
        axes.text(
            at - 0.008,
            (top + bottom) / 2,
            name,
            rotation=0 if small else 90,
            ha="center" if not small else "right",
            va="center",
            color=tone["ink"],
            fontsize=8,
            transform=transform,
            clip_on=False,
        )
