"""Packs streams where the loader opens them: in its workers, each of which writes a part of the store.

To the loader most of these streams are empty: what it reads are reports on those that were packed lately. So who packs
which stream, what becomes of a worker's death and of a stream that breaks are the loader's affair.

Guarantee: what is entered in the journal is on the disk. A stream that breaks off is not in the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from stream_dataloader.errors import ErrorReport
from stream_dataloader.stores._base.packing import Packer
from stream_dataloader.stores._packing.given import Given
from stream_dataloader.stores._packing.items import Items
from stream_dataloader.stores._packing.journal import Entry, append, begin_part
from stream_dataloader.stream_info import get_stream_info

__all__ = ["Packed", "StreamPacker", "close_part"]

SYNC_SECONDS = 1.0
_REPORT_SECONDS = 0.1


class Packed(NamedTuple):
    """A stream was packed: its number, its steps, and what they take, about."""

    number: int
    steps: int
    bytes: int


class StreamPacker:
    """A factory of streams for a loader: to read one packs a stream, and yields reports if it is time.

    In the second epoch, each that is opened finishes its worker's part, and does not end.

    Args:
        given: The streams.
        packer: Writes the format.
        transform: See `pack`.
        journal: The path of the journal.
        ended: Numbers of streams that are not wanted, of which nothing is read.
    """

    def __init__(
        self,
        given: Given,
        packer: Packer,
        transform: Callable[[Any], Any] | None,
        journal: str,
        ended: Collection[int],
    ) -> None:
        self._factory_of = given.factory_of
        self._keys = given.keys
        self._lengths = given.lengths
        self._windowed = given.windowed
        self._packer = packer
        self._transform = transform
        self._journal = journal
        self._ended = ended

    def __call__(self, source: Any) -> Iterator[list[Packed] | ErrorReport | None]:
        info = get_stream_info()
        if info.epoch:
            yield self._close()
            while True:  # so that no lane takes a second stream, and each takes one
                yield None
        elif info.source_index not in self._ended and (reports := self._pack(info.source_index, source)):
            yield reports

    def _pack(self, number: int, source: Any) -> list[Packed] | ErrorReport:
        length = -1 if self._lengths is None else int(self._lengths[number])
        items = Items(source, self._factory_of(number), self._transform, windowed=self._windowed, length=length)
        try:
            if (part := _parts.get(self._journal)) is None:
                part = _parts[self._journal] = _Part(self._packer, self._journal)
            part.write(number, self._keys[number], items)
        except Exception as error:
            if (failure := items.failure(error)) is not None:
                raise failure from failure.__cause__
            return ErrorReport(error)
        finally:
            items.close()
        return part.reports(_REPORT_SECONDS)

    def _close(self) -> list[Packed] | ErrorReport:
        part = _parts.get(self._journal)
        try:
            close_part(self._journal)
        except Exception as error:
            return ErrorReport(error)
        return [] if part is None else part.reports(0)


class _Part:
    """The part of the store that this process writes."""

    def __init__(self, packer: Packer, path: str) -> None:
        self._path = path
        self._part = packer.part(begin_part(path))
        self._syncs_beside = getattr(self._part, "syncs_beside", False)
        self._written: list[Entry] = []
        self._synced = time.monotonic()
        self._beside: Future[None] | None = None
        self._pool = ThreadPoolExecutor(1, "pack-sync")
        self._reports: list[Packed] = []
        self._reported = 0.0

    def write(self, number: int, key: str, items: Items) -> None:
        """Write a stream; see `PartPacker.write`."""
        steps, place = self._part.write(number, key, items)
        self._written.append(Entry(number, steps, place))
        self._reports.append(Packed(number, steps, items.bytes))
        if time.monotonic() - self._synced >= getattr(self._part, "sync_seconds", SYNC_SECONDS):
            self._wait()
            self._beside = self._pool.submit(self._sync, self._part.sync, self._written)
            self._written, self._synced = [], time.monotonic()
            if not self._syncs_beside:
                self._wait()

    def reports(self, seconds: float) -> list[Packed]:
        """What was packed since the last time; nothing if that is less than some seconds ago."""
        if time.monotonic() - self._reported < seconds:
            return []
        self._reported = time.monotonic()
        reports, self._reports = self._reports, []
        return reports

    def _sync(self, sync: Callable[[], None], written: list[Entry]) -> None:
        """Have the disk hold what was written, and enter it."""
        sync()
        append(self._path, [{"stream": list(entry)} for entry in written])

    def _wait(self) -> None:
        """Wait for what is synced beside.

        Raises:
            OSError: The disk is full, or another error of it.
        """
        beside, self._beside = self._beside, None
        if beside is not None:
            beside.result()

    def close(self) -> None:
        """Finish the part, and enter what was written."""
        try:
            self._wait()
        finally:
            self._pool.shutdown()
            self._sync(self._part.close, self._written)


#: What this process writes, by the journal's path.
_parts: dict[str, _Part] = {}


def close_part(journal: str) -> None:
    """Finish what this process writes, if it does."""
    if (part := _parts.pop(journal, None)) is not None:
        part.close()
