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
            number: Its number. After an interrupt it may be written again; the place in its record tells what counts.
            key: Its name.
            items: Its time steps. If they raise, what was written of them must not be in the store. Once the first was
                taken, `items.reads_into` tells whether `items.read_into(out, n)` writes up to n to arrays `(n, ...)`.

        Returns:
            How many steps there were, and where they lie, as JSON can hold it.

        Raises:
            ValueError, TypeError: The steps do not fit each other, those of other streams, or the format.
            OSError: Of the disk. Packing stops, whatever `on_error` says.
        """
        ...

    def sync(self) -> Any:
        """Have the disk hold all streams that were written. They are entered in the journal after that.

        What it returns, as JSON can hold it, is entered with them, and `Packer.finish` is given it.

        A part with an attribute `syncs_beside = True` is synced in another thread, while the next stream is written.
        `sync_seconds` is how often at most, if that is not once a second.
        """
        ...

    def close(self) -> Any:
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

    def finish(self, records: Sequence[StreamRecord], synced: Sequence[Any]) -> None:
        """Make the folder a whole store of these streams, in this order, when all parts are closed.

        `synced` is what all parts have returned of `sync` and `close`, of each in order.

        If that was interrupted, it is called again, with the same records: what it needs is removed last.
        """
        ...
