"""Parts of a store, shards or pieces of files, that are fetched or unpacked when they are first read.

Guarantee: a machine fetches a part once. Those are open that some stream reads.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Generic, TypeVar

from stream_dataloader.stores._base.handles import Handles, Lease
from stream_dataloader.streams.cache.file_cache import LocalFile

__all__ = ["ShardReader", "Shards"]

HandleT = TypeVar("HandleT")


class Shards(ABC, Generic[HandleT]):
    """The parts of a store, by number; none of the cache, which makes room, is one of `most_idle`."""

    def __init__(self, most_idle: int = 0) -> None:
        self._opened: Handles[int, HandleT] = Handles(self._open, most_idle)

    @abstractmethod
    def file(self, number: int) -> LocalFile:
        """A part as a local file, to be closed; waits until it is there."""

    @abstractmethod
    def _open(self, number: int) -> HandleT: ...

    def is_here(self, number: int) -> bool:
        """Whether a part need not be fetched or unpacked."""
        del number
        return False

    def open(self, number: int) -> Lease[int, HandleT]:
        """A part, to be closed; waits until it is there."""
        with self.file(number):  # first, as one is opened at a time
            return self._opened.lease(number)

    def ahead(self, number: int) -> list[LocalFile]:
        """Fetch a part in a thread; it is held for as long as the list is."""
        held: list[LocalFile] = []

        def fetch() -> None:
            with suppress(Exception):  # the reader meets it again, and says where
                held.append(self.file(number))

        threading.Thread(target=fetch, name="stream_dataloader shard", daemon=True).start()
        return held

    def close(self) -> None:
        """Close what no stream reads."""
        self._opened.close()


class ShardReader(Generic[HandleT]):
    """The part that one stream reads, and up to `ahead` more, until `last`, that are fetched."""

    def __init__(self, shards: Shards[HandleT], ahead: int, last: int) -> None:
        self._shards, self._most_ahead, self._last = shards, ahead, last
        self._open: tuple[int, Lease[int, HandleT]] | None = None
        self._ahead: dict[int, list[LocalFile]] = {}

    def at(self, number: int) -> HandleT:
        """A part, open until another is asked for."""
        if self._open is None or self._open[0] != number:
            self._open = None
            self._open = number, self._shards.open(number)
            ahead, shards = self._ahead, self._shards
            wanted = range(number + 1, min(number + self._most_ahead, self._last) + 1)
            self._ahead = {
                one: ahead[one] if one in ahead else shards.ahead(one) for one in wanted if not shards.is_here(one)
            }
        return self._open[1].handle

    def close(self) -> None:
        """Let go of all."""
        self._open, self._ahead = None, {}
