"""A worker's side of a pool: which session it reads, and the messages that it sends.

Guarantee: a part that cannot be pickled, or unpickled, is an error at its own step; those before it arrive.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
import threading
import time as clock
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, get_worker_info

from stream_dataloader._assembly.part import MESSAGE_BYTES, Contents, Fault, Part, pack
from stream_dataloader._assembly.slot_pool import PooledSlots, SlotPool
from stream_dataloader._assembly.slots import MOST_STEPS_A_MESSAGE, Slots
from stream_dataloader._memory.pickling import ByValue, Message
from stream_dataloader._reading.activity import ActivityBoard, Meters
from stream_dataloader._reading.plan import NO_RECOVERY, Reading, Start
from stream_dataloader._reading.reader import read_as_worker, unsendable
from stream_dataloader._reading.sessions import SessionKey
from stream_dataloader._reading.worker_info import worker_info_hidden
from stream_dataloader._schedule.rules import Reader
from stream_dataloader._workers.exchange import ROOM, Exchange, join, read_in_threads, read_in_turn
from stream_dataloader._workers.mailbox import Mailbox
from stream_dataloader._workers.seeding import base_seed, seed_worker
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import ErrorReport, detached
from stream_dataloader.stream_info import workers_seed

_NUMBER_BYTES = 16  # of a run, with what is reported of its lane


class Arrived(NamedTuple):
    """What a message that has arrived carries, or what unpickling it raised. Plain numbers are sent as what arrives."""

    content: Any
    error: Exception | None = None

    def read(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.content


def _arrive(pickled: bytes) -> Arrived:
    """Unpickle a message on arrival: its sender, of which large items are fetched, may end soon."""
    try:
        return Arrived(pickle.loads(pickled))
    except Exception as error:
        return Arrived(None, detached(error))  # its frames may hold a connection that a worker waits for


class WorkerParts(IterableDataset[Any]):
    """What torch's `DataLoader` iterates over in each worker: messages with its parts in a session.

    The main process sets its attributes before it starts workers, which get a copy.
    """

    def __init__(
        self,
        members: Sequence[StreamDataset],
        readers: Sequence[Reader],
        mailbox: Mailbox,
        key: SessionKey,
        meters: Meters,
        board: ActivityBoard,
    ) -> None:
        self._members = members
        self._readers = readers
        self._mailbox = mailbox
        self._key = key
        self._meters = meters
        self._board = board
        self.sessions = 0  # before the one that is iterated next
        self.slots: SlotPool | None = None  # where windows go; None: with the messages
        self.starts: Sequence[Start] = ()  # of the first session in a process
        self._worker_id: int  # of this process, once it has read
        self._is_kept = False  # this process has read a session before
        self.recovery = NO_RECOVERY  # what is different after a worker died
        self.are_paced = False  # parts are sent as they come, and not far ahead of batches
        self._threads: list[threading.Thread] = []  # with which this process read before

    def __getstate__(self) -> dict[str, Any]:
        members = [  # its class may be one that workers would not find
            (ByValue(type(dataset), "the dataset's class"), dataset.__getstate__()) for dataset in self._members
        ]
        return self.__dict__ | {"_members": members}

    def __setstate__(self, state: dict[str, Any]) -> None:
        members: list[StreamDataset] = []
        for kind, inside in state["_members"]:
            dataset = object.__new__(kind.value)
            dataset.__setstate__(inside)
            members.append(dataset)
        self.__dict__.update(state | {"_members": members})

    def __iter__(self) -> Iterator[Message | Arrived]:
        if (worker := get_worker_info()) is not None:  # the first time
            self._worker_id = worker.id
            worker_info_hidden.for_good()
        self._mailbox.pids[self._worker_id] = os.getpid()
        self.sessions += 1
        messages = self._read(self.sessions, self._worker_id)
        if self._is_kept:  # others may still read the session before
            return messages
        first = list(itertools.islice(messages, 1))  # now, while other workers are started
        return itertools.chain(first, messages)

    def workers_seed(self, epoch: int, restart: int = 0, step: int = 0) -> int:
        """What the workers that start there are seeded with, beside their ids."""
        rules = self._members[0].rules
        return workers_seed(rules.seed, epoch, rules.groups.first, restart, step)

    def _read(self, session: int, worker_id: int) -> Iterator[Message | Arrived]:
        join(self._threads)  # they may still write to slots that are used again
        if self._mailbox.closed(session):
            return
        with contextlib.closing(self._steps(session, worker_id)) as read:
            mailbox, count = self._mailbox, 1
            mailbox.filled(worker_id, 0.0, 1)
            for number in itertools.count():
                count = 1 if self.are_paced else mailbox.steps_of(session, number, count)
                begin = clock.monotonic()
                steps = list(itertools.islice(read, count))
                if not steps:
                    break
                parts = list(itertools.chain.from_iterable(steps))
                message = _message(worker_id, parts)
                most_steps = self._most_steps(len(steps), parts, message)
                mailbox.filled(worker_id, clock.monotonic() - begin, most_steps)
                yield message
        mailbox.leave(session, worker_id)

    def _steps(self, session: int, worker_id: int) -> Generator[list[Part], None, None]:
        member = self._board.member(worker_id)
        start = self.starts[member]
        if self._is_kept:
            start = start._replace(epoch=self._mailbox.epoch(session), resume=None)
            seed_worker(base_seed(self.workers_seed(start.epoch)) + worker_id)
        self._is_kept = True
        dataset = self._members[member]
        own = [number for number, reader in enumerate(self._readers) if reader.worker_id == worker_id]
        taken = self._meters.taken[own[0] : own[-1] + 1] if self.are_paced else None
        exchange = Exchange(len(own), ROOM, taken)
        reading = Reading(
            dataset.plan(),
            start,
            self._readers,
            self._board,
            self._meters,
            member,
            Slots if self.slots is None else functools.partial(PooledSlots, self.slots, session),
            self.recovery,
        )
        readers = read_as_worker(
            reading,
            dataset.session_table,
            self._key._replace(iteration=session, member=member),
            worker_id,
            is_over := lambda: exchange.closed or self._mailbox.closed(session),
            in_threads=self.are_paced,
        )
        if not self.are_paced:
            return read_in_turn(readers)
        self._threads = []
        return read_in_threads(readers, exchange, self._threads, is_over)

    def _most_steps(self, steps: int, parts: list[Part], message: Message | Arrived) -> int:
        """How many steps a message like this one may carry: as the slots allow, and as its size does."""
        slots = self.slots if any(part.contents.in_slot for part in parts) else None
        in_slots = MOST_STEPS_A_MESSAGE if slots is None else slots.most_steps
        if isinstance(message, Message):
            return min(in_slots, MESSAGE_BYTES * steps // len(message))
        numbers = sum(len(part.contents.runs) for part in parts)
        return min(in_slots, MESSAGE_BYTES * steps // (_NUMBER_BYTES * numbers + 1))


def _message(worker_id: int, parts: list[Part]) -> Message | Arrived:
    packed = pack(parts)
    if Part not in map(type, packed):
        return Arrived(packed)
    try:
        return Message(packed, _arrive)
    except Exception as error:
        if len(parts) > 1:  # those before the one that cannot be pickled can
            return Message([packed for part in parts for packed in _message(worker_id, [part]).read()], _arrive)
        (part,) = parts
        runs = part.contents.runs
        fault = Fault(runs[0] if runs else 0, True, ErrorReport(unsendable(part, worker_id, error)))
        return Message([part._replace(contents=Contents(runs=runs), faults=[fault])], _arrive)
