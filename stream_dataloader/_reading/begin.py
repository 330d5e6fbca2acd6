"""Begins to read what a plan says: all of it in this process, in one thread or several, or one worker's share.

Who reads which lanes of the batch is decided by `deal_members`; a reader's number in it is its place on boards, and
its place among the readers of its member is that in sessions. A worker has lanes of one member only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from torch.utils.data import get_worker_info

from stream_dataloader._assembly.slot_pool import SlotPool
from stream_dataloader._assembly.slot_writer import Slots, SlotWriter
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
    reader: int = 0,
    readers: Sequence[Reader] | None = None,
    whole_windows: bool = False,
    slots: Slots | None = None,
    resume: Snapshot | None = None,
    meters: Meters | None = None,
) -> PartReader:
    """Read all lanes of a plan in this process.

    Args:
        plan: What to read, and how.
        epoch: The epoch's number.
        reader: Which of the readers this is.
        readers: Who reads which lanes of the batch; None: there is one reader.
        whole_windows: See `Share`.
        slots: Where the windows are to go.
        resume: Where in the epoch to begin; None at its beginning.
        meters: Where to count what is done.
    """
    readers = readers or deal_lanes(plan.rules.lanes, 0)
    share = Share(
        queue=local_queue(plan.rules, epoch, plan.scheduled_lengths, resume),
        lanes=range(plan.rules.lanes),
        batch_lanes=readers[reader].lanes,
        member=readers[reader].member,
        worker_id=readers[reader].worker_id,
        reader=reader,
        whole_windows=whole_windows,
        board=ActivityBoard(readers, shared=False),
        locally=True,
        slots=slots,
        resume=resume,
        meter=unread_meter() if meters is None else meters.of(reader),
    )
    return PartReader(plan, share)


def read_in_threads(
    plan: ReadingPlan,
    epoch: int,
    readers: Sequence[Reader],
    member: int,
    *,
    whole_windows: bool,
    slots: SlotPool | None,
    session: int,
    resume: Snapshot | None,
    board: ActivityBoard,
    meters: Meters,
    closed: Callable[[], bool],
) -> list[Callable[[], PartReader]]:
    """Read all lanes of a member in this process, each worker's in a thread.

    Args:
        plan: What to read, and how.
        epoch: The epoch's number.
        readers: Who reads which lanes of the batch.
        member: Whose lanes are read.
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
    own = _readers_of(readers, member)
    queues = thread_queues(plan.rules, epoch, plan.scheduled_lengths, resume, len(own), closed)
    found: list[Callable[[], PartReader]] = []
    for (number, reader, lanes), queue in zip(own, queues, strict=True):
        share = Share(
            queue=queue,
            lanes=lanes,
            batch_lanes=reader.lanes,
            member=member,
            worker_id=reader.worker_id,
            reader=number,
            whole_windows=whole_windows,
            board=board,
            slots=None if slots is None else SlotWriter(slots, reader.lanes, session, whole_windows=whole_windows),
            resume=resume,
            meter=meters.of(number),
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
        plan: What to read, and how: that of the member whose lanes they are.
        table: Holds the sessions of what is read.
        session: Names the session.
        readers: Who reads which lanes of the batch; None: each worker has one reader.
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
    own = _readers_of(readers, board.member(worker.id))
    for place, (number, reader, lanes) in enumerate(own):
        if reader.worker_id != worker.id:
            continue
        queue = join_session(
            table,
            session,
            place,
            workers=len(own),
            lengths=plan.scheduled_lengths,
            epoch=epoch,
            resume=resume,
            closed=closed,
            gives_up=in_threads,
        )
        iteration = session.iteration
        share = Share(
            queue=queue,
            lanes=lanes,
            batch_lanes=reader.lanes,
            member=reader.member,
            worker_id=worker.id,
            reader=number,
            whole_windows=whole_windows,
            board=board,
            slots=None if slots is None else SlotWriter(slots, reader.lanes, iteration, whole_windows=whole_windows),
            resume=resume,
            recovery=recovery,
            meter=unread_meter() if meters is None else meters.of(number),
        )
        found.append(PartReader(plan, share))
    return found


def _readers_of(readers: Sequence[Reader], member: int) -> list[tuple[int, Reader, range]]:
    """A member's readers: each with its number among all, and its lanes as that member's schedule numbers them."""
    own = [(number, reader) for number, reader in enumerate(readers) if reader.member == member]
    first = own[0][1].lanes.start
    return [(number, r, range(r.lanes.start - first, r.lanes.stop - first)) for number, r in own]
