"""Draws the pictures of the concept pages. Those of lanes and padding show what a loader really delivers.

    python docs/draw.py [FOLDER]

Writes SVG files into the folder, `docs/drawings` by default. A test compares the files with what is drawn anew.
"""

from __future__ import annotations

import argparse
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any

from stream_dataloader import StreamDataLoader, StreamDataset

LENGTHS = {"a": 6, "b": 3, "c": 3, "d": 7, "e": 4, "f": 2}
COLOURS = ("#8ecae6", "#ffb703", "#a7c957", "#f4978e", "#cdb4db", "#94d2bd", "#e9c46a", "#bdb2ff")
INK, SOFT, PAPER, EMPTY = "#1d2433", "#667085", "#fcfcfd", "#eef0f4"
CELL = 26  # pixels


class Drawing:
    """Shapes, one after the other, on a light card."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
            f"<title>{escape(title)}</title>",
            '<defs><pattern id="again" width="6" height="6" patternUnits="userSpaceOnUse" '
            f'patternTransform="rotate(45)"><path d="M0 0V6" stroke="{INK}" stroke-width="1.6" opacity="0.45"/>'
            "</pattern></defs>",
            f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>',
        ]

    def text(self, x: float, y: float, words: str, **style: Any) -> None:
        """Words, their baseline at y; `size`, `anchor`, `colour`, `bold`."""
        weight = ' font-weight="600"' if style.get("bold") else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-family="system-ui, sans-serif" font-size="{style.get("size", 13)}" '
            f'text-anchor="{style.get("anchor", "start")}" fill="{style.get("colour", INK)}"{weight}>'
            f"{escape(words)}</text>"
        )

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, *, stroke: str = "#ffffff"
    ) -> None:
        """A box with round corners."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}" stroke="{stroke}"/>'
        )

    def line(
        self, points: list[tuple[float, float]], colour: str = SOFT, *, dashed: bool = False
    ) -> None:
        """A line through points."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dash = ' stroke-dasharray="4 4"' if dashed else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"{dash}/>'
        )

    def arrow(
        self,
        x: float,
        y: float,
        to_x: float,
        to_y: float,
        colour: str = SOFT,
        *,
        dashed: bool = False,
    ) -> None:
        """A line with a head, which points to the right or downwards."""
        self.line([(x, y), (to_x, to_y)], colour, dashed=dashed)
        head = [(-5, -3), (-5, 3)] if to_x > x else [(-3, -5), (3, -5)]
        points = " ".join(f"{to_x + dx:g},{to_y + dy:g}" for dx, dy in [(0, 0), *head])
        self._parts.append(f'<polygon points="{points}" fill="{colour}"/>')

    def cell(
        self, x: float, y: float, letter: str, *, again: bool = False, start: bool = False
    ) -> None:
        """A time step: the stream it is of, hatched if it is not in the mask, with a bar where the stream starts."""
        fill = COLOURS[(ord(letter) - ord("a")) % len(COLOURS)] if letter else EMPTY
        self.box(x, y, CELL, CELL, fill)
        if again:
            self.box(x, y, CELL, CELL, "url(#again)", stroke="none")
        if start:
            self.line([(x + 1.5, y + 2), (x + 1.5, y + CELL - 2)], INK)
        self.text(x + CELL / 2, y + CELL / 2 + 4.5, letter, anchor="middle")

    def svg(self) -> str:
        """The file's text."""
        return "\n".join([*self._parts, "</svg>\n"])


def batches(count: int, **options: Any) -> list[Any]:
    """The first batches of the six streams on two lanes."""
    letters = list(LENGTHS)
    dataset = StreamDataset(
        letters, lambda letter: range(LENGTHS[letter]), 2, time_steps=4, lookahead=0, **options
    )
    return list(islice(StreamDataLoader(dataset), count))


def draw_batches(drawing: Drawing, x: float, y: float, delivered: list[Any]) -> float:
    """Batches side by side, a row a lane; returns where the next could stand."""
    for lane in range(2):
        drawing.text(x, y + lane * (CELL + 4) + 18, f"lane {lane}", colour=SOFT)
    x += 52
    for batch in delivered:
        drawing.text(
            x + 2 * CELL, y - 7, f"batch {batch.batch_index}", anchor="middle", size=11, colour=SOFT
        )
        for lane in range(2):
            for t in range(4):
                source, real = int(batch.source_index[t, lane]), bool(batch.mask[t, lane])
                letter = "" if source < 0 else list(LENGTHS)[source]
                place = x + t * CELL, y + lane * (CELL + 4)
                drawing.cell(
                    *place,
                    letter,
                    again=source >= 0 and not real,
                    start=bool(batch.is_first[t, lane]),
                )
        x += 4 * CELL + 14
    return x


def lanes() -> Drawing:
    """Windows that are aligned, and packed."""
    drawing = Drawing(560, 250, "Six streams on two lanes, in aligned and in packed windows")
    for y, windows, words in (
        (24, "aligned", 'windows="aligned": a stream starts at t = 0 of a window'),
        (144, "packed", 'windows="packed": the next stream starts on the very next time step'),
    ):
        drawing.text(16, y, words, bold=True)
        draw_batches(drawing, 16, y + 32, batches(4, windows=windows))
    return drawing


def padding() -> Drawing:
    """The four padding modes."""
    rows = (
        ("zeros", "pads with fill_value until the last stream has ended"),
        ("data", "reads sources again (hatched: not in the mask)"),
        ("drop", "ends before the first batch with an idle lane"),
        ("cycle", "never ends: each pass over the sources is an epoch"),
    )
    drawing = Drawing(680, 20 + 112 * len(rows), "The four padding modes")
    for row, (mode, words) in enumerate(rows):
        y = 26 + 112 * row
        drawing.text(16, y, f'padding_mode="{mode}" {words}', bold=True)
        delivered = batches(5, padding_mode=mode, windows="packed")
        end = draw_batches(drawing, 16, y + 32, delivered)
        if mode == "cycle":
            drawing.text(end, y + 64, "...", size=18)
    return drawing


def logical_time() -> Drawing:
    """A fast worker waits until no earlier position can still take a source."""
    drawing = Drawing(
        640, 270, "Sources are granted in the order of (step, lane), not of the clock"
    )
    drawing.text(
        16, 26, "Two lanes run out of data in step 5. Lane 1's worker is the faster one.", bold=True
    )
    drawing.arrow(110, 236, 616, 236)
    drawing.text(614, 256, "clock", anchor="end", colour=SOFT)
    for y, worker, begin, asks, gets, letter in (
        (70, 0, 110, 400, 424, "d"),
        (150, 1, 110, 236, 440, "e"),
    ):
        drawing.text(16, y + 18, f"lane {worker}", bold=True)
        drawing.text(16, y + 34, f"worker {worker}", size=11, colour=SOFT)
        drawing.box(begin, y, asks - begin, CELL, COLOURS[worker])
        drawing.text((begin + asks) / 2, y + 18, "reads its stream", anchor="middle")
        drawing.text(asks, y - 8, f"request (5, {worker})", anchor="middle", size=12)
        drawing.line([(asks, y - 4), (asks, y + CELL + 4)], INK)
        if gets - asks > 2 * CELL:
            drawing.line([(asks, y + CELL / 2), (gets, y + CELL / 2)], dashed=True)
            drawing.text(
                (asks + gets) / 2,
                y + CELL + 14,
                "waits: (5, 0) may still ask",
                anchor="middle",
                size=11,
            )
        drawing.box(gets, y, 160, CELL, COLOURS[ord(letter) - ord("a")])
        drawing.text(gets + 80, y + 18, f"reads source {letter}", anchor="middle")
    drawing.text(
        110,
        218,
        "The n-th request in logical time gets the n-th source: the same in every run.",
        colour=SOFT,
    )
    return drawing


def resume() -> Drawing:
    """What a state is of: what was delivered."""
    drawing = Drawing(640, 250, "A state says what was delivered, not what workers have read ahead")
    for y, words in ((26, "first run, two workers"), (150, "second run, any number of workers")):
        drawing.text(16, y, words, bold=True)
    for number in range(7):
        x = 16 + 84 * number
        ahead = number > 3
        drawing.box(x, 44, 76, 34, EMPTY if ahead else COLOURS[2])
        drawing.text(x + 38, 66, f"batch {number}", anchor="middle", colour=SOFT if ahead else INK)
        if ahead:
            drawing.box(x, 168, 76, 34, COLOURS[2])
            drawing.text(x + 38, 190, f"batch {number}", anchor="middle")
    drawing.text(16, 96, "delivered", size=12, colour=SOFT)
    drawing.text(352, 96, "read ahead by workers, thrown away", size=12, colour=SOFT)
    drawing.line([(348, 38), (348, 112)], INK)
    drawing.text(340, 126, "state_dict()", anchor="end", bold=True)
    drawing.arrow(348, 112, 348, 160, INK)
    drawing.text(340, 190, "load_state_dict(state)", anchor="end", bold=True)
    drawing.text(
        352, 224, "Bit for bit the batches of a run without a break.", size=12, colour=SOFT
    )
    return drawing


def ranks() -> Drawing:
    """Virtual ranks, and who hosts them."""
    drawing = Drawing(
        640,
        300,
        "Virtual ranks are dealt to ranks; a global batch does not depend on who hosts them",
    )
    drawing.text(
        16,
        26,
        "The epoch's order is dealt to virtual ranks, each with lanes of its own.",
        bold=True,
    )
    for group in range(4):
        x = 110 + 130 * group
        drawing.box(x, 44, 122, 34, COLOURS[group])
        drawing.text(
            x + 61,
            66,
            f"virtual {group}: lanes {2 * group}, {2 * group + 1}",
            anchor="middle",
            size=12,
        )
    for row, hosts in enumerate((4, 2, 1)):
        y = 108 + 58 * row
        drawing.text(16, y + 24, f"{hosts} rank{'s' if hosts > 1 else ''}", bold=True)
        width = 4 // hosts
        for rank in range(hosts):
            x = 110 + 130 * width * rank
            drawing.box(x, y, 130 * width - 8, 38, PAPER, stroke=SOFT)
            held = ", ".join(str(group) for group in range(rank * width, rank * width + width))
            words = f"rank {rank}: virtual {held}"
            drawing.text(x + 65 * width - 4, y + 24, words, anchor="middle", size=12)
    drawing.text(
        110,
        288,
        "Each row gives the same global batches, also after a change in mid-epoch.",
        colour=SOFT,
    )
    return drawing


def main() -> None:
    """Write all of them."""
    parser = argparse.ArgumentParser(description="Draws the pictures of the concept pages.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent / "drawings")
    folder = parser.parse_args().folder
    drawings = {
        "lanes.svg": lanes(),
        "logical-time.svg": logical_time(),
        "padding.svg": padding(),
        "resume.svg": resume(),
        "ranks.svg": ranks(),
    }
    for name, drawing in drawings.items():
        (folder / name).write_text(drawing.svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
