"""What a stream is opened from, and when it is opened again.

Guarantee: an error of a stream names its source, the item, the lane and the worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from stream_dataloader._schedule.sections import Section
from stream_dataloader.errors import StreamError, shorten
from stream_dataloader.stream_info import StreamInfo


class Origin(NamedTuple):
    """What a stream is opened from.

    Attributes:
        info: Source, epoch, lane and worker.
        fresh: Its items are read for the first time this epoch.
        source: The source.
        factory: Opens it.
        section: The items of the source that are read.
        length: How many items `lengths` has for the source; -1 if nothing.
    """

    info: StreamInfo
    fresh: bool
    source: Any
    factory: Callable[..., Any]
    section: Section
    length: int = -1

    def error(self, kind: type[StreamError], what: str, item: int) -> StreamError:
        """An error of the stream at an item."""
        info, source = self.info, shorten(self.source)
        return kind(
            f"source {info.source_index} ({source}), item {item}, lane {info.lane}, worker {info.worker_id}: {what}",
            source_index=info.source_index,
            source=source,
            position=item,
            lane=info.lane,
            worker_id=info.worker_id,
        )


class Retries(NamedTuple):
    """When a stream that breaks is opened again.

    Attributes:
        most: How often in a row.
        on: For which exceptions.
        epochs: The epoch in which each source was opened again last.
    """

    most: int
    on: tuple[type[Exception], ...]
    epochs: dict[int, int]
