"""Each stream is read from an iterator of its own.

Guarantee: within a process, an iterator that another stream is being read from, and a generator that was read from
before, are told apart from new ones by identity. A generator that ended would be an empty stream, in silence.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

from stream_dataloader._memory.endings import WeakItems, WeakValues

#: Readers by the identity of what they read from: not each iterator may be referred to weakly.
_readers: WeakValues[int, Any] = WeakValues()
_begun: WeakItems[Generator[Any, Any, Any]] = WeakItems()


def why_not_own(iterator: Iterator[Any], reader: Any) -> str:
    """Why an iterator is not the reader's own, or nothing; the reader has it as `iterator` as long as it reads."""
    other = _readers.get(id(iterator))
    if other is not None and other is not reader and other.iterator is iterator:
        return f"source {other.info.source_index} is being read from"
    if isinstance(iterator, Generator):
        if iterator in _begun:
            return "was read from before"
        _begun.add(iterator)
    _readers[id(iterator)] = reader
    return ""
