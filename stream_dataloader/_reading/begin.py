"""Begins to read a member of a batch: all of it in this process, or one worker's share.

Who reads which lanes of the batch is decided by `deal_members`; a reader's number in it is its place on boards, and
its place among the readers of its member is that in sessions. A worker has lanes of one member only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from stream_dataloader._reading.plan import Reading, Share
from stream_dataloader._reading.reader import PartReader
from stream_dataloader._reading.sessions import SessionKey, SessionTable
from stream_dataloader._reading.source_queue import SessionQueue, SourceQueue


def read_here(reading: Reading, closed: Callable[[], bool] | None = None) -> list[Callable[[], PartReader]]:
    """Read all lanes of a member in this process, each reader's in a thread if there are several.

    Returns:
        For each reader what begins to read; to be called in its thread, which opens, reads and closes all of its
        streams.
    """
    assert reading.start is not None
    rules, order = reading.plan.rules, reading.order(reading.start.epoch)
    queues = [SourceQueue(rules, order, closed)]
    if len(reading.own) > 1:
        queues = SessionQueue.of_threads(rules, order, len(reading.own), closed or (lambda: False))
    return [
        functools.partial(PartReader, Share(reading, number, reader, queue))
        for (number, reader), queue in zip(reading.own, queues, strict=True)
    ]


def read_as_worker(
    reading: Reading,
    table: SessionTable,
    session: SessionKey,
    worker_id: int,
    closed: Callable[[], bool] = lambda: False,
    *,
    in_threads: bool = False,
) -> list[PartReader]:
    """Read one worker's lanes, which takes part in a session with the others.

    Returns:
        The worker's readers. Streams are opened, read and closed in the thread that uses a reader.
    """
    found: list[PartReader] = []
    rules, epoch, count = table.rules, None if reading.start is None else reading.start.epoch, len(reading.own)
    for place, (number, reader) in enumerate(reading.own):
        if reader.worker_id == worker_id:
            queue: SourceQueue
            if count == 1:
                queue = SourceQueue(rules, reading.order(table.take_epoch(session.owner) if epoch is None else epoch))
            else:
                row, order = table.join(session, place, count, epoch, reading.order)
                queue = SessionQueue(row, place, rules, order, table.locked, closed, gives_up=in_threads)
            found.append(PartReader(Share(reading, number, reader, queue)))
    return found
