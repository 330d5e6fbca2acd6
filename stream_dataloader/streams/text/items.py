"""Units of a text as items: one by one, or each with the unit after it as its target.

Guarantee: what can be read before an error is handed out first; the next call raises the error, and every one after.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from stream_dataloader.streams.text.blocks import NOTHING, Codes
from stream_dataloader.streams.text.units import Units

__all__ = ["TextItems"]


class TextItems:
    """Units from number `start` on, or pairs of a unit and the next; a `protocols.ReadsInto`."""

    def __init__(self, units: Units, start: int, dtype: np.dtype[Any], targets: bool) -> None:
        self._units = units
        self._dtype = dtype
        self._targets = targets
        self._arrays = units.read(start)
        self._error: Exception | None = None
        self._rows: Codes = next(self._arrays, NOTHING) if start else NOTHING
        self._position = 0  # in `_rows`
        self._ahead = int(targets)  # units that must follow an item's own

    def _available(self) -> int:
        """How many items can be made of what was read; reads on if there are none."""
        while len(self._rows) - self._position <= self._ahead:
            if self._error is not None:
                raise self._error
            try:
                more = next(self._arrays, None)
            except Exception as error:
                self._error = error
                raise
            if more is None:
                return 0
            rest = self._rows[self._position :]
            self._rows = np.concatenate([rest, more]) if len(rest) else more
            self._position = 0
        return len(self._rows) - self._position - self._ahead

    def at_end(self) -> bool:
        """Whether no unit is left, not even a last one that only serves as a target."""
        return not self._available() and self._position == len(self._rows)

    def __iter__(self) -> Iterator[Any]:
        unit = functools.partial(np.array, dtype=self._dtype)
        while self._available():
            rows, position = self._rows, self._position
            self._position += 1
            if self._targets:
                yield {"input": unit(rows[position]), "target": unit(rows[position + 1])}
            else:
                yield unit(rows[position])

    def read_into(self, out: Any) -> int:
        """Write the next items to `out`; see `protocols.ReadsInto`."""
        leaves = [out["input"], out["target"]] if self._targets else [out]
        done, room = 0, len(leaves[0])
        while done < room:
            try:
                count = min(self._available(), room - done)
            except Exception:
                if done:  # the next call raises it again
                    break
                raise
            if not count:
                break
            for shift, leaf in enumerate(leaves):
                first = self._position + shift
                leaf[done : done + count] = self._rows[first : first + count]
            self._position += count
            done += count
        return done

    def close(self) -> None:
        """Close the file."""
        self._units.close()
