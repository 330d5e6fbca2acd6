"""How a worker process reads with several readers: each in a thread of its own, or one after the other.

Guarantees: a reader's streams are opened, read and closed in one thread; what ends a thread (an error, `sys.exit`) is
raised in the worker's own thread, in place of the part that is missing, as if that thread had read.
"""

from __future__ import annotations

import itertools
import threading
import time as clock
from collections.abc import Sequence
from typing import TypeAlias

from stream_dataloader._assembly.part import Part
from stream_dataloader._reading.reader import PartReader
from stream_dataloader._workers.exchange import Exchange, Failure, deliver

#: How many steps a thread reads before they are asked for, so that one that is fast need not wait for the slowest. If
#: steps of two lanes take 12 ms on average, exponentially distributed, a batch takes 20.8 ms with 1, 17.9 ms with 2 and
#: 16.8 ms with 3; by two processes with a `prefetch_factor` of 2 it takes 18.0 ms.
ROOM = 2

_FAREWELL_SECONDS = 4.0  # after a failure, to all threads together: it is raised though one of them hangs


class InTurn:
    """Read in the thread that asks, with one reader after the other."""

    def __init__(self, readers: Sequence[PartReader]) -> None:
        self._readers = readers
        for reader in readers:  # the first would wait for those behind it
            reader.announce()

    def __iter__(self) -> InTurn:
        return self

    def __next__(self) -> list[Part]:
        parts = [part for reader in self._readers for part in itertools.islice(reader, 1)]
        if not parts:
            raise StopIteration
        return parts

    def close(self) -> None:
        """Close all streams; no part is wanted any more."""
        for reader in self._readers:
            reader.close()


class InThreads:
    """Each reader reads in a thread of its own, until the exchange is closed."""

    def __init__(self, readers: Sequence[PartReader], exchange: Exchange) -> None:
        self._exchange = exchange
        self._failed = False
        self._threads = [
            threading.Thread(
                target=deliver, args=(number, reader, exchange), name=f"stream-reader-{number}", daemon=True
            )
            for number, reader in enumerate(readers)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # the system refuses another one
            exchange.close()
            raise

    def __iter__(self) -> InThreads:
        return self

    def __next__(self) -> list[Part]:
        found = self._exchange.take()
        if isinstance(found, Failure):
            self._failed = True
            raise found.error
        if not found:
            raise StopIteration
        return found

    def close(self) -> None:
        """As `InTurn`."""
        self._exchange.close()
        self.wait(_FAREWELL_SECONDS if self._failed else None)

    def wait(self, seconds: float | None = None) -> None:
        """Wait until all streams are closed, for some time; None: also those that hang."""
        deadline = None if seconds is None else clock.monotonic() + seconds
        for thread in self._threads:
            if thread is not threading.current_thread():  # garbage is collected in any thread
                thread.join(None if deadline is None else max(deadline - clock.monotonic(), 0))


#: The steps of one worker: the parts that its readers, those that have not ended, made of each.
WorkerSteps: TypeAlias = InTurn | InThreads
