"""Packs streams where the loader opens them: in its workers, each of which writes a part of the store.

To the loader most of these streams are empty: what it reads are reports on those that were packed lately.

Guarantee: what is entered in the journal is on the disk. A stream that breaks off is not in the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from stream_dataloader._items.layout import Layout
from stream_dataloader._items.structure import Misfit, flatten
from stream_dataloader._reading.stream import END, OpenedStream
from stream_dataloader._schedule.sections import Section
from stream_dataloader.errors import ErrorReport, ItemError, ReadError, StoreError, StreamError, shorten
from stream_dataloader.stores._base.packing import Packer
from stream_dataloader.stores._packing.given import Given
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
        skipped: Numbers of streams that are not wanted.
    """

    def __init__(
        self,
        given: Given,
        packer: Packer,
        transform: Callable[[Any], Any] | None,
        journal: str,
        skipped: Collection[int],
    ) -> None:
        self._lists = given.lists
        self._retries = given.retries
        self._keys = given.keys
        self._windowed = given.windowed
        self._packer = packer
        self._transform = transform
        self._journal = journal
        self._skipped = skipped

    def __call__(self, source: Any) -> Iterator[list[Packed] | ErrorReport | None]:
        info = get_stream_info()
        if info.epoch:
            yield self._close()
            while True:  # so that no lane takes a second stream, and each takes one
                yield None
        elif info.source_index not in self._skipped and (reports := self._pack(source)):
            yield reports

    def _pack(self, source: Any) -> list[Packed] | ErrorReport:
        info, lengths = get_stream_info(), self._lists.lengths
        number = info.source_index
        length = -1 if lengths is None or self._windowed else int(lengths[number])
        section, factory = Section(number, 0, length, length), self._lists.of(number).open_stream
        stream = OpenedStream(info, factory, source, section, self._retries)
        items = _Items(stream, self._transform, self._windowed, self._retries.most)
        try:
            if (part := _parts.get(self._journal)) is None:
                part = _parts[self._journal] = _Part(self._packer, self._journal)
            part.write(number, self._keys[number], items)
        except StreamError:
            raise
        except Exception as error:
            if isinstance(error, (ValueError, TypeError)) and not isinstance(error, StoreError):
                raise items.stream.error(ItemError, str(error), handed_out=True) from error
            return ErrorReport(error)
        finally:
            items.stream.close()
        return part.reports(_REPORT_SECONDS)

    def _close(self) -> list[Packed] | ErrorReport:
        part = _parts.get(self._journal)
        try:
            close_part(self._journal)
        except Exception as error:
            return ErrorReport(error)
        return [] if part is None else part.reports(0)


class _Items:
    """One stream's time steps, as a packer takes them: cut out of windows, transformed, counted; see `PartPacker`."""

    def __init__(
        self, stream: OpenedStream, transform: Callable[[Any], Any] | None, windowed: bool, retries: int
    ) -> None:
        self.stream = stream
        self._transform = transform
        self._windowed = windowed
        self._may_read_into = transform is None and not windowed and not retries
        self._first: Any = ()

    def __iter__(self) -> Iterator[Any]:
        is_first = True
        while (item := self.stream.next_item()) is not END:
            for step in self._steps_of(item) if self._windowed else (item,):
                found = step if self._transform is None else self._transformed(step)
                if is_first:
                    self._first, is_first = found, False
                yield found

    def _transformed(self, step: Any) -> Any:
        assert self._transform is not None
        try:
            return self._transform(step)
        except Exception as error:
            what = f"transform raised {shorten(error, 2000)}"
            raise self.stream.error(ReadError, what, handed_out=True) from error

    def _steps_of(self, window: Any) -> Iterator[Any]:
        """The time steps of a window; a leaf without a time axis is in each of them."""
        try:
            layout, leaves = Layout.of(window, windowed=True)
            count = layout.window_length(leaves)
        except Misfit as error:
            raise self.stream.error(ItemError, str(error), handed_out=True) from None
        timed = [spec.timed for spec in layout.specs]
        leaves = flatten(window)[1]
        for step in range(count):
            yield layout.build([leaf[step] if cut else leaf for leaf, cut in zip(leaves, timed, strict=True)])

    @property
    def step_bytes(self) -> int:
        """What a step takes, about."""
        return int(sum(getattr(leaf, "nbytes", 8) for leaf in flatten(self._first)[1]))

    @property
    def reads_into(self) -> bool:
        """Whether the steps behind the first can be had by `read_into`."""
        opened = self.stream.opened
        return self._may_read_into and opened is not None and opened.writes

    def read_into(self, out: Any, most: int) -> int:
        """See `protocols.ReadsInto`; `most` is for how many steps there is room."""
        return self.stream.read_into(out, most)


class _Part:
    """The part of the store that this process writes."""

    def __init__(self, packer: Packer, path: str) -> None:
        self._path = path
        number, self._ended = begin_part(path)
        self._part = packer.part(number)
        self._syncs_beside = getattr(self._part, "syncs_beside", False)
        self._written: list[Entry] = []
        self._synced = time.monotonic()
        self._beside: Future[None] | None = None
        self._pool = ThreadPoolExecutor(1, "pack-sync")
        self._reports: list[Packed] = []
        self._reported = 0.0

    def write(self, number: int, key: str, items: _Items) -> None:
        """Write a stream; see `PartPacker.write`."""
        if number in self._ended:  # by a worker that died before it had reported that
            self._reports.append(Packed(number, 0, 0))
            return
        steps, place = self._part.write(number, key, items)
        self._written.append(Entry(number, steps, place))
        self._reports.append(Packed(number, steps, steps * items.step_bytes))
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

    def _sync(self, sync: Callable[[], Any], written: list[Entry]) -> None:
        """Have the disk hold what was written, and enter it."""
        append(self._path, {"synced": sync(), "streams": written})

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
