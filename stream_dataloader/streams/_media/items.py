"""Pictures as items, each converted directly into its place in the batch or in an item.

Guarantee: items that were read before an error are delivered, then the error is raised.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

from stream_dataloader.streams._media.picture import ArrayConverter, AvConverter

__all__ = ["PictureItems"]


class PictureItems:
    """Stream of pictures, see `protocols.ReadsInto`. One `read_into` reads at most `at_once` of them."""

    def __init__(
        self, frames: Iterator[tuple[Any, Any]], converter: AvConverter | ArrayConverter, at_once: int = sys.maxsize
    ) -> None:
        self._frames, self._converter, self._at_once = frames, converter, at_once
        self._error: Exception | None = None

    def beside(self, frame: Any, moment: Any) -> dict[str, Any]:  # noqa: ARG002 - of subclasses
        """Return the item's other values. Without any, the item is the picture alone."""
        return {}

    def __iter__(self) -> Iterator[Any]:
        if self._error is not None:
            raise self._error
        try:
            for frame, moment in self._frames:
                picture = self._converter.empty(frame)
                self._converter.write(frame, picture)
                beside = self.beside(frame, moment)
                del frame  # so that the decoder can reuse its memory
                yield {"frame": picture, **beside} if beside else picture
        except Exception as error:
            self._error = error
            raise

    def read_into(self, out: Any) -> int:
        if self._error is not None:
            raise self._error
        pictures = out["frame"] if isinstance(out, dict) else out
        count = 0
        try:
            for frame, moment in itertools.islice(self._frames, min(len(pictures), self._at_once)):
                self._converter.write(frame, pictures[count])
                for name, value in self.beside(frame, moment).items():
                    out[name][count] = value
                count += 1
        except Exception as error:
            self._error = error
            if not count:
                raise
        return count
