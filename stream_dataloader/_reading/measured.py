"""A stream that is read up to an item that is known: a section of a source, or a source whose length was given.

A section is opened at its first item as a stream is that goes on from a saved state: by `start`, by `seek_item`, or by
reading on. Items keep the numbers that they have in the whole source.

Guarantee: no item behind a section is handed out. A source of another length than `lengths` says is an error, at the
item that is one too many, or at the end that comes too early. With sections that is looked up at its last one.
"""

from __future__ import annotations

from typing import Any

from stream_dataloader._kept_fields import map_leaves
from stream_dataloader._reading.stream import END, OpenedStream
from stream_dataloader._schedule.sections import Section
from stream_dataloader.errors import LengthError


class MeasuredStream(OpenedStream):
    """A section of a stream, or all of one.

    Args:
        section: Which; where it ends is known.
        length: What `lengths` has for the source.
        cut: Sources are cut into sections by them, so that there must be lengths.
        given: As for `OpenedStream`.
    """

    def __init__(self, *given: Any, section: Section, length: int, cut: bool, **options: Any) -> None:
        super().__init__(*given, **options)
        self.items = self.begin = section.start
        self.stop: int = section.stop
        self._ends = section.ends
        self._length = length
        self._cut = cut

    @property
    def _is_over(self) -> bool:
        return self.items >= self.stop and self._error is None

    def next_item(self) -> Any:
        """See `OpenedStream.next_item`.

        Raises:
            LengthError: The stream has another length.
        """
        if self._is_over and not self._ends:
            return END
        item = super().next_item()  # behind the source's last section: END, or an item that is one too many
        self._check(ended=item is END)
        return item

    def read_into(self, out: Any, most: int) -> int:
        """See `OpenedStream.read_into`.

        Raises:
            LengthError: As `next_item`.
        """
        if self._is_over and not self._ends:
            return 0
        if 0 < (room := self.stop - self.items) < most:
            out, most = map_leaves(out, lambda leaf: leaf[:room]), room
        count = super().read_into(out, most)
        self._check(ended=count == 0)
        return count

    def _check(self, *, ended: bool) -> None:
        if self.items > self.stop or (ended and self.items < self.stop):
            remedy = "correct it" if self._cut else "correct it, or build the dataset without lengths"
            raise self.error(
                LengthError,
                f"the stream has {'only' if ended else 'at least'} {self.items} items, and "
                f"lengths[{self.info.source_index}] is {self._length}; {remedy}",
                handed_out=not ended,
            )
