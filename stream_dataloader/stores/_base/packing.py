"""What a format does so that streams can be packed into it, by several processes at once.

`pack` makes a folder next to the place where the store will be, has each worker write its part of the store, and gives
the folder its name when all is there. The records of streams are kept in a journal, so that packing goes on after an
interrupt: a stream whose record is in the journal is not written again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

__all__ = ["Packer", "PartPacker", "StreamRecord"]


class StreamRecord(NamedTuple):
    """A stream that was packed.

    Attributes:
        number: Its number in the new store.
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

    def write(self, number: int, key: str, items: Iterator[Any]) -> tuple[int, Any]:
        """Write a stream.

        Args:
            number: Its number.
            key: Its name.
            items: Its time steps. They may raise; then what was written of the stream must not be in the store.

        Returns:
            How many steps there were, and where they lie, as JSON can hold it.
        """
        ...

    def sync(self) -> None:
        """Have the disk hold all streams that were written. They are entered in the journal after that."""
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

        What interrupted streams left, and no record mentions, may be removed or stay unused.
        """
        ...
