"""Where some units of a text begin, for when it is opened again in the same process."""

from __future__ import annotations

import bisect
from typing import Any

__all__ = ["Marks"]

#: At least so much text is between two marks.
_MARK_BYTES = 1 << 20

_MARKED_TEXTS = 256


class Marks:
    """Pairs `(units before it, offset)` of texts, ascending.

    Marks are made while a text is read, and belong to the process that reads it. Streams that are read at the same time
    each make a list of their own, so that no lock is needed.
    """

    def __init__(self) -> None:
        self._marks: dict[Any, list[tuple[int, int]]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Marks, ()

    def until(self, key: Any, units: int) -> list[tuple[int, int]]:
        """The marks of a text that have at most so many units before them."""
        marks = self._marks.get(key, [])
        return marks[: bisect.bisect_right(marks, units, key=lambda mark: mark[0])]

    @staticmethod
    def add(marks: list[tuple[int, int]], units: int, offset: int) -> None:
        """Put a mark behind others, unless it is close to the last one."""
        if not marks or offset - marks[-1][1] >= _MARK_BYTES:
            marks.append((units, offset))

    def keep(self, key: Any, marks: list[tuple[int, int]]) -> None:
        """Keep a text's marks, if they go further than those known."""
        known = self._marks.get(key)
        if not marks or (known and known[-1] >= marks[-1]):
            return
        self._marks[key] = marks
        for oldest in list(self._marks)[:-_MARKED_TEXTS]:  # at once: another thread may keep marks meanwhile
            self._marks.pop(oldest, None)
