"""Packing of streams where the loader opens them: each worker writes a part of the store.

For the loader, streams yield only reports of packed streams.

Guarantee: everything that a journal lists is on the disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from stream_dataloader._engine.items.layout import Layout
from stream_dataloader._engine.items.structure import Misfit, flatten
from stream_dataloader._engine.reading.lists import SourceLists
from stream_dataloader._engine.reading.opening import END
from stream_dataloader._engine.reading.stream import OpenedStream, Retries
from stream_dataloader._engine.schedule.sections import Section
from stream_dataloader.errors import ErrorReport, ItemError, ReadError, StoreError, StreamError, shorten
from stream_dataloader.stores._base.packing import Packer
from stream_dataloader.stores._packing.partial import begin_part, enter, packed_in
from stream_dataloader.stream_info import get_stream_info

__all__ = ["StreamPacker"]

SYNC_SECONDS = 1.0
_REPORT_SECONDS = 0.1

#: Numbers of packed streams, and their numbers of steps.
Report = list[tuple[int, int]]


@dataclass(eq=False)
class StreamPacker:
    """Factory whose streams pack a source when they are read, and yield a report now and then.

    In the second epoch a stream finishes its worker's part, and does not end.
    """

    lists: SourceLists
    keys: Sequence[str]
    packer: Packer
    journal: str
    transform: Callable[[Any], Any] | None
    windowed: bool = False
    retries: Retries = Retries(0, (), {})  # noqa: RUF009  never written to
    _part: _Part | None = None  # the part that this process writes

    def __call__(self, source: Any) -> Iterator[Report | ErrorReport | None]:
        info = get_stream_info()
        try:
            report = self.close() if info.epoch else self._pack(source)
        except StreamError:
            raise
        except Exception as error:  # of the disk, for example: skipping a stream would not help
            yield ErrorReport(error)
        else:
            if report:
                yield report
        while info.epoch:  # so that no lane takes a second stream
            yield None

    def _pack(self, source: Any) -> Report:
        info, lengths = get_stream_info(), self.lists.lengths
        number = info.source_index
        length = -1 if lengths is None or self.windowed else int(lengths[number])
        factory = self.lists.of(number).open_stream
        stream = OpenedStream(info, factory, source, Section(number, 0, length, length), self.retries)
        try:
            if self._part is None:
                self._part = _Part(self.packer, self.journal)
            self._part.write(number, self.keys[number], _Items(stream, self))
        except (StoreError, StreamError):
            raise
        except (ValueError, TypeError) as error:
            raise stream.error(ItemError, str(error), handed_out=True) from error
        finally:
            stream.close()
        return self._part.report(_REPORT_SECONDS)

    def close(self) -> Report:
        part, self._part = self._part, None
        if part is None:
            return []
        part.close()
        return part.report(0)


class _Items:
    """Time steps of a stream, cut out of windows and transformed."""

    def __init__(self, stream: OpenedStream, how: StreamPacker) -> None:
        self._stream, self._transform, self._windowed = stream, how.transform, how.windowed
        self._may_read_into = how.transform is None and not how.windowed and not how.retries.most
        self.read_into = stream.read_into

    def __iter__(self) -> Iterator[Any]:
        while (item := self._stream.next_item()) is not END:
            for step in _steps_of(item) if self._windowed else (item,):
                try:
                    yield step if self._transform is None else self._transform(step)
                except Exception as error:
                    what = f"transform raised {shorten(error, 2000)}"
                    raise self._stream.error(ReadError, what, handed_out=True) from error

    @property
    def reads_into(self) -> bool:
        return self._may_read_into and self._stream.writes


def _steps_of(window: Any) -> Iterator[Any]:
    try:
        layout, leaves = Layout.of(window, windowed=True)
        count = layout.window_length(leaves)
    except Misfit as error:
        raise ValueError(str(error)) from None
    leaves = flatten(window)[1]
    for step in range(count):
        cut = zip(leaves, layout.specs, strict=True)
        yield layout.build(leaf[step] if spec.timed else leaf for leaf, spec in cut)


class _Part:
    """Part of the store that this process writes, and its journal."""

    def __init__(self, packer: Packer, journal: str) -> None:
        number, self._journal = begin_part(journal)
        self._done = packed_in(journal)[0]
        self._part = packer.part(number)
        self._written: list[tuple[int, int, Any]] = []
        self._synced = time.monotonic()
        self._beside: Future[None] | None = None
        self._pool = ThreadPoolExecutor(1, "pack-sync")
        self._report: Report = []
        self._reported = 0.0

    def write(self, number: int, key: str, items: _Items) -> None:
        if number in self._done:  # maybe packed by a worker that died before it reported this
            self._report.append((number, 0))
            return
        steps, place = self._part.write(number, key, items)
        self._written.append((number, steps, place))
        self._report.append((number, steps))
        if time.monotonic() - self._synced >= getattr(self._part, "sync_seconds", SYNC_SECONDS):
            self._wait()
            self._beside = self._pool.submit(self._sync, self._part.sync, self._written)
            self._written, self._synced = [], time.monotonic()
            if not getattr(self._part, "syncs_beside", False):
                self._wait()

    def report(self, seconds: float) -> Report:
        if time.monotonic() - self._reported < seconds:
            return []
        self._reported = time.monotonic()
        report, self._report = self._report, []
        return report

    def _sync(self, sync: Callable[[], Any], written: list[tuple[int, int, Any]]) -> None:
        enter(self._journal, {"synced": sync(), "streams": written})

    def _wait(self) -> None:
        beside, self._beside = self._beside, None
        if beside is not None:
            beside.result()

    def close(self) -> None:
        with self._journal:
            try:
                self._wait()
            finally:
                self._pool.shutdown()
                self._sync(self._part.close, self._written)
