"""Begins to read what a plan says: all of it in this process, in one thread or several, or one worker's share.

Who reads which lanes is decided by `deal_lanes`; a reader's number in it is its place in sessions and on boards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from torch.utils.data import get_worker_info

from stream_dataloader._assembly.slot_pool import SlotPool
from stream_dataloader._assembly.writer import SlotWriter
from stream_dataloader._reading.activity import ActivityBoard
from stream_dataloader._reading.meters import Meters, unread_meter
from stream_dataloader._reading.plan import ReadingPlan
from stream_dataloader._reading.reader import PartReader
from stream_dataloader._reading.sessions import SessionKey, SessionTable
from stream_dataloader._reading.share import NO_RECOVERY, Recovery, Share
from stream_dataloader._reading.source_queue import join_session, local_queue, thread_queues
from stream_dataloader._schedule.rules import Reader, deal_lanes
from stream_dataloader._schedule.snapshot import Snapshot


def read_locally(
    plan: ReadingPlan,
    epoch: int,
    *,
    whole_windows: bool = False,
    resume: Snapshot | None = None,
    meters: Meters | None = None,
) -> PartReader:
    """Read all lanes in this process.

    Args:
        plan: What to read, and how.
        epoch: The epoch's number.
        whole_windows: See `Share`.
        resume: Where in the epoch to begin; None at its beginning.
        meters: Where to count what is done.
    """
    share = Share(
        queue=local_queue(plan.rules, epoch, plan.scheduled_lengths, resume),
        lanes=range(plan.rules.lanes),
        worker_id=0,
        reader=0,
        whole_windows=whole_windows,
        board=ActivityBoard(deal_lanes(plan.rules.lanes, 0), shared=False),
        locally=True,
        resume=resume,
        meter=unread_meter() if meters is None else meters.of(0),
    )
    return PartReader(plan, share)


def read_in_threads(
    plan: ReadingPlan,
    epoch: int,
    workers: int,
    *,
    whole_windows: bool,
    slots: SlotPool | None,
    session: int,
    resume: Snapshot | None,
    board: ActivityBoard,
    meters: Meters,
    closed: Callable[[], bool],
) -> list[Callable[[], PartReader]]:
    """Read all lanes in this process, each worker's in a thread.

    Args:
        plan: What to read, and how.
        epoch: The epoch's number.
        workers: How many there are, no more than lanes.
        whole_windows: See `Share`.
        slots: Where the windows are to go.
        session: The session's number, for the slots.
        resume: Where in the epoch to begin; None at its beginning.
        board: Where to say what is being done.
        meters: Where to count what is done.
        closed: Whether nothing more is wanted.

    Returns:
        For each worker what begins to read; to be called in its thread, which opens, reads and closes all of its
        streams.
    """
    queues = thread_queues(plan.rules, epoch, plan.scheduled_lengths, resume, workers, closed)
    found: list[Callable[[], PartReader]] = []
    for (worker, lanes), queue in zip(deal_lanes(plan.rules.lanes, workers), queues, strict=True):
        share = Share(
            queue=queue,
            lanes=lanes,
            worker_id=worker,
            reader=worker,
            whole_windows=whole_windows,
            board=board,
            slots=None if slots is None else SlotWriter(slots, lanes, session, whole_windows=whole_windows),
            resume=resume,
            meter=meters.of(worker),
        )
        found.append(functools.partial(PartReader, plan, share))
    return found


def read_as_worker(
    plan: ReadingPlan,
    table: SessionTable,
    session: SessionKey,
    *,
    readers: Sequence[Reader] | None = None,
    in_threads: bool = False,
    epoch: int | None = None,
    whole_windows: bool = False,
    slots: SlotPool | None = None,
    resume: Snapshot | None = None,
    board: ActivityBoard | None = None,
    recovery: Recovery = NO_RECOVERY,
    meters: Meters | None = None,
    closed: Callable[[], bool] = lambda: False,
) -> list[PartReader]:
    """Read this worker's lanes, as one of torch's `DataLoader` workers that take part in a session.

    Args:
        plan: What to read, and how.
        table: Holds the sessions of what is read.
        session: Names the session.
        readers: Who reads which lanes; None: each worker has one reader.
        in_threads: Each of its readers is to be used in a thread of its own.
        epoch: The epoch's number; None takes the table's next.
        whole_windows: See `Share`.
        slots: Where the windows are to go.
        resume: Where in the epoch to begin; None at its beginning.
        board: Where to say what is being done.
        recovery: What is different after a worker died.
        meters: Where to count what is done.
        closed: Whether nothing more is wanted.

    Returns:
        The worker's readers. Streams are opened, read and closed in the thread that uses a reader.
    """
    worker = get_worker_info()
    assert worker is not None
    if readers is None:
        readers = deal_lanes(plan.rules.lanes, worker.num_workers)
    board = board or ActivityBoard(readers, shared=False)
    found: list[PartReader] = []
    for number, (worker_id, lanes) in enumerate(readers):
        if worker_id != worker.id:
            continue
        queue = join_session(
            table,
            session,
            number,
            workers=len(readers),
            lengths=plan.scheduled_lengths,
            epoch=epoch,
            resume=resume,
            closed=closed,
            gives_up=in_threads,
        )
        share = Share(
            queue=queue,
            lanes=lanes,
            worker_id=worker_id,
            reader=number,
            whole_windows=whole_windows,
            board=board,
            slots=None if slots is None else SlotWriter(slots, lanes, session.iteration, whole_windows=whole_windows),
            resume=resume,
            recovery=recovery,
            meter=unread_meter() if meters is None else meters.of(number),
        )
        found.append(PartReader(plan, share))
    return found
