"""A section of a stream being read: items `[begin, stop)` of its source.

It is opened at its first item as a stream is that goes on from a saved state: by `start`, by `seek_item`, or by reading
on. Items keep the numbers that they have in the whole source.

Guarantee: no item behind the section is handed out. That the source ends with its last section is looked up, so
`lengths` that leave out the end of a source are an error, as without sections.
"""

from __future__ import annotations

from typing import Any

from stream_dataloader._reading.stream import END, OpenedStream
from stream_dataloader._schedule.sections import Section
from stream_dataloader.batch import map_leaves


class SectionStream(OpenedStream):
    """A section of a stream.

    Args:
        section: Which; where it ends is known.
        given: As for `OpenedStream`.
    """

    def __init__(self, *given: Any, section: Section, **options: Any) -> None:
        super().__init__(*given, **options)
        self.items = self.begin = section.start
        self.stop: int = section.stop
        self._ends = section.ends

    @property
    def _is_over(self) -> bool:
        return self.items >= self.stop and self._error is None

    def next_item(self) -> Any:
        """See `OpenedStream.next_item`."""
        if self._is_over and not self._ends:
            return END
        return super().next_item()  # behind the source's last section: END, or an item that is one too many

    def read_into(self, out: Any, most: int) -> int:
        """See `OpenedStream.read_into`."""
        if self._is_over:
            return super().read_into(out, most) if self._ends else 0
        if (room := self.stop - self.items) < most:
            out, most = map_leaves(out, lambda leaf: leaf[:room]), room
        return super().read_into(out, most)
