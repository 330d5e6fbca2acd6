"""Batches come in order: each lane goes on where the state that is kept for it stopped.

A lane's state belongs to the last item that it was made of. The next batch's first item of that lane must be the one
after it, or the first of a stream. So a batch that is left out, repeated, or of another loader is found, while epochs
may be numbered in any way.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from stream_dataloader.errors import StateError
from stream_dataloader.recurrent.window import Ends, Window

#: In place of a lane's source: nothing is kept for the lane; or, after `reset`, it may begin anywhere.
_NEVER, _ANYWHERE = -3, -2


class LaneOrder:
    """The last item that each lane's state was made of."""

    def __init__(self) -> None:
        self._missing = _NEVER
        self._source = np.empty(0, np.int64)
        self._position = np.empty(0, np.int64)

    def _grow(self, lanes: npt.NDArray[np.int64]) -> None:
        """Have a place for each of these lanes."""
        if (more := int(lanes.max()) + 1 - len(self._source)) > 0:
            self._source = np.concatenate([self._source, np.full(more, self._missing)])
            self._position = np.concatenate([self._position, np.full(more, -1)])

    def known(self, window: Window) -> npt.NDArray[np.bool_]:
        """For which rows of a batch a state is kept."""
        self._grow(window.lanes)
        found: npt.NDArray[np.bool_] = self._source[window.lanes] > _ANYWHERE
        return found

    def check(self, window: Window, place: str) -> None:
        """Raise unless each lane goes on where its state stopped.

        Args:
            window: The batch.
            place: Names it.

        Raises:
            StateError: A lane does not.
        """
        self._grow(window.lanes)
        source, position = self._source[window.lanes], self._position[window.lanes]
        same = (source == window.first.source) & (position + 1 == window.first.position)
        wrong = window.goes_on & ~same & (source != _ANYWHERE)
        if not wrong.any():
            return
        row = int(wrong.argmax())
        lane, now = window.lanes[row], f"source {window.first.source[row]} at position {window.first.position[row]}"
        if source[row] == _NEVER:
            raise StateError(
                f"lane {lane} goes on with {now} in {place}, and no state is kept for it; load the state that was "
                "saved with the loader's, or call reset() to begin there with the initial value"
            )
        kept = "before its first item" if source[row] < 0 else f"after source {source[row]}, position {position[row]}"
        raise StateError(
            f"lane {lane} goes on with {now} in {place}, and the state kept for it is that {kept}; pass each batch to "
            "before() and after() once, in the loader's order, have a RecurrentState for each loader, and save both "
            "states as of the same batch"
        )

    def advance(self, window: Window) -> None:
        """Follow a batch."""
        self._grow(window.lanes)
        real = window.lanes[window.real]
        self._source[real] = window.last.source[window.real]
        self._position[real] = window.last.position[window.real]
        idle = window.lanes[~window.real]
        self._source[idle] = np.where(self._source[idle] == _NEVER, -1, self._source[idle])

    def forget(self, lanes: Iterable[int] | None) -> None:
        """Let lanes, or all of them, begin anywhere."""
        if lanes is None:
            self._missing = _ANYWHERE
            self._source[:] = _ANYWHERE
        else:
            chosen = np.fromiter(lanes, np.int64)
            if len(chosen):
                self._grow(chosen)
                self._source[chosen] = _ANYWHERE

    def last(self, lanes: npt.NDArray[np.int64]) -> Ends:
        """The last item of each of these lanes."""
        return Ends(self._source[lanes], self._position[lanes])

    @classmethod
    def of(cls, lanes: npt.NDArray[np.int64], last: Ends) -> LaneOrder:
        """Of lanes with these last items."""
        order = cls()
        if len(lanes):
            order._grow(lanes)
            order._source[lanes], order._position[lanes] = last
        return order
