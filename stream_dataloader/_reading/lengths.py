"""How many items each stream is to have, where the user has said so with `lengths`.

Guarantee: a stream of another length is an error, at the item that is one too many, or at the end that comes too early.
"""

from __future__ import annotations

from stream_dataloader._reading.stream import END, OpenedStream
from stream_dataloader._schedule.rules import IntArray
from stream_dataloader.errors import LengthError


class Lengths:
    """What streams were said to have.

    Args:
        lengths: `(num_sources,)`, number of items of each source, -1 where it is unknown.
        cut: Sources are cut into sections by them, so that there must be lengths.
    """

    def __init__(self, lengths: IntArray, *, cut: bool) -> None:
        self._lengths = lengths
        self._remedy = "correct it" if cut else "correct it, or build the dataset without lengths"

    def of(self, stream: OpenedStream) -> int:
        """How many items of the source a stream is to be read up to; -1 if that is unknown."""
        return int(self._lengths[stream.info.source_index]) if stream.stop is None else stream.stop

    def next_item(self, stream: OpenedStream) -> object:
        """The next item of a stream; see `OpenedStream.next_item`.

        Raises:
            StreamError: It could not be read, or the stream is of another length.
        """
        item = stream.next_item()
        self.check(stream, ended=item is END)
        return item

    def check(self, stream: OpenedStream, *, ended: bool) -> None:
        """Compare a stream's length with what was said, after items were read, or its end was.

        Raises:
            LengthError: The stream has another length.
        """
        index, promised = stream.info.source_index, self.of(stream)
        if 0 <= promised < stream.items or (ended and stream.items < promised):
            has = "only" if ended else "at least"
            raise stream.error(
                LengthError,
                f"the stream has {has} {stream.items} items, and lengths[{index}] is {self._lengths[index]}; "
                f"{self._remedy}",
                handed_out=not ended,
            )
