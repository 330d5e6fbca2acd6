"""A timeline as text: a letter a stream, from a to z and again, its first time step in capitals, padding as dots.

Guarantee: no line is longer than asked for. If time steps are more than there is room for, a character stands for
several, and shows the stream that has most of them.
"""

from __future__ import annotations

import numpy as np

from stream_dataloader.visualize.assignment import Assignment

__all__ = ["draw_text"]

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_PADDING = "·"
_LEAST_WIDTH = 40


def draw_text(timeline: Assignment, width: int) -> str:
    """See `Timeline.text`."""
    width = max(width, _LEAST_WIDTH)
    several = len(timeline.workers) > 1
    margin = 10 + 12 * several
    cells = max(timeline.steps * timeline.time_steps, 1)
    scale = -(-cells // (width - margin))
    columns = -(-cells // scale)
    drawn = np.full((timeline.lanes, columns), _PADDING)
    for lane in range(timeline.lanes):
        share = np.zeros(columns, np.int64)
        for segment in (found for found in timeline.segments if found.lane == lane):
            letter = _LETTERS[segment.source % len(_LETTERS)]
            for column in range(segment.begin // scale, -(-segment.stop // scale)):
                covered = min(segment.stop, (column + 1) * scale) - max(segment.begin, column * scale)
                if covered > share[column]:
                    share[column] = covered
                    drawn[lane, column] = letter
            if segment.starts:
                drawn[lane, segment.begin // scale] = letter.upper()
    owner = {lane: worker for worker, lanes in enumerate(timeline.workers) for lane in lanes[:1]}
    lines = [
        f"{timeline.steps} batches of {timeline.time_steps} time steps, {timeline.lanes} lanes, {timeline.streams} "
        f"streams, padding {timeline.padding_share:.1%}"
        + (f"; a character is {scale} time steps" if scale > 1 else ""),
        " " * margin + _ruler(timeline, scale, columns),
    ]
    for lane in range(timeline.lanes):
        head = f"worker {owner[lane]}".ljust(12) if several and lane in owner else " " * 12 * several
        lines.append((head + f"lane {lane}").ljust(margin) + "".join(drawn[lane]))
    return "\n".join(line.rstrip() for line in lines)


def _ruler(timeline: Assignment, scale: int, columns: int) -> str:
    """Numbers of batches, where they begin, as far as they do not run into each other."""
    line, end = [" "] * columns, 0
    for step in range(timeline.steps):
        at, number = step * timeline.time_steps // scale, str(step)
        if at >= end and at + len(number) <= columns:
            line[at : at + len(number)] = number
            end = at + len(number) + 1
    return "".join(line)
