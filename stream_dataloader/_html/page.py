"""Escaped text and tables, and a limit to their size.

Guarantee: what `page` returns is at most `LIMIT_BYTES` long, in UTF-8, and it never raises an `Exception`.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence

#: Of what a notebook is given for one object. It is saved in the file with every run.
LIMIT_BYTES = 100_000


def escaped(value: str, limit: int = 60) -> str:
    """Text on one line, cut, in which nothing is markup or cannot be shown."""
    cut = str.__getitem__(value, slice(limit + 1))  # of a subclass too, whatever that does
    shown = "".join(letter if letter.isprintable() else " " for letter in cut[:limit])
    return html.escape(shown) + ("…" if len(cut) > limit else "")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML already."""
    lines = [_row("th", head), *(_row("td", row) for row in rows)]
    return f'<table style="border-collapse:collapse" cellpadding="4">{"".join(lines)}</table>'


def _row(tag: str, cells: Sequence[str]) -> str:
    shown = (f'<{tag} style="text-align:left">{cell}</{tag}>' for cell in cells)
    return f"<tr>{''.join(shown)}</tr>"


def size(text: str) -> int:
    """Bytes in UTF-8."""
    return len(text.encode("utf-8", "replace"))


def page(make: Callable[[], str], otherwise: Callable[[], str]) -> str:
    """What `make` returns, or the other's text."""
    for way in (make, lambda: preformatted(otherwise())):
        try:
            if size(made := way()) <= LIMIT_BYTES:
                return made
        except Exception:  # noqa: S112 - a notebook shows what it can
            continue
    return "<pre>(cannot be shown)</pre>"


def preformatted(text: str) -> str:
    """Text in several lines, as it is, cut where it is too long."""
    kept = text[: LIMIT_BYTES // 8]  # a character takes at most six bytes
    shown = "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in kept)
    return f'<pre style="line-height:1.2">{html.escape(shown)}{"…" if len(text) > len(kept) else ""}</pre>'
