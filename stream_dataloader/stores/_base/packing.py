"""What a format does so that streams can be packed into it, by several processes at once.

`pack` makes a folder next to the place where the store will be, has each worker write its part of the store, and gives
the folder its name when all is there. The records of streams are kept in a journal, so that packing goes on after an
interrupt: a stream whose record is in the journal is not written again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

__all__ = ["Packer", "PartPacker", "StreamRecord"]


class StreamRecord(NamedTuple):
    """A stream that was packed.

    Attributes:
        number: The number it was written with. Its number in the new store is its place among the records: streams
            that could not be read leave a gap in these numbers.
        key: Its name: that of the store it comes from, or its source as text.
        steps: How many time steps it has.
        place: Where it lies, as JSON can hold it; what the format's `PartPacker` returned.
        metadata: What is known of it besides, as JSON can hold it.
    """

    number: int
    key: str
    steps: int
    place: Any
    metadata: Mapping[str, Any] = {}


class PartPacker(Protocol):
    """Writes streams in one worker, one after the other."""

    def write(self, number: int, key: str, items: Iterable[Any]) -> tuple[int, Any]:
        """Write a stream.

        Args:
            number: Its number, see `StreamRecord`. After an interrupt a stream may be written again, by this part or
                another; the place in its record tells which one counts.
            key: Its name.
            items: Its time steps. They may raise; then what was written of the stream must not be in the store, and
                the next stream may be written. As soon as the first one was taken, `items.reads_into` tells whether
                `items.read_into(out, n)` writes up to n further ones to arrays `(n, ...)`, as `protocols.ReadsInto` has
                it; the attribute may be missing.

        Returns:
            How many steps there were, and where they lie, as JSON can hold it.

        Raises:
            ValueError: The steps do not fit each other, or those of other streams; names the step, and both sides.
            TypeError: The format cannot hold them.
            OSError: The disk is full, or another error of it. Packing stops, whatever `on_error` says.
        """
        ...

    def sync(self) -> None:
        """Have the disk hold all streams that were written. They are entered in the journal after that.

        A part that has an attribute `syncs_beside = True` is synced in another thread, while the next stream is
        written; it has to hold only those that were written when it is called. `sync_seconds` is how often it is called
        at most, if that is not once a second.
        """
        ...

    def close(self) -> None:
        """Finish the part, as `sync` does, and close its files."""
        ...


class Packer(Protocol):
    """How a format is packed. It is sent to workers.

    It is made of the folder to write to, which exists and may hold what an interrupted run has written, and of the
    format's options, by keyword.
    """

    def part(self, worker: int) -> PartPacker:
        """A part of the store, in a worker; no two workers have the same number, nor has one of an earlier run."""
        ...

    def finish(self, records: Sequence[StreamRecord]) -> None:
        """Make the folder a whole store of these streams, in this order. The main process does, when parts are closed.

        What interrupted streams left, and no record mentions, may be removed or stay unused. If it was interrupted, it
        is called again, with the same records: it has to give the same store from wherever it was broken off, also if
        all was done. So what it needs is removed last.
        """
        ...
