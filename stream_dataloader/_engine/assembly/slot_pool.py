"""A pool of slots of shared memory. Workers assemble batches in them, and delivered batches lease them.

A slot holds the data of one whole batch::

            a worker begins a step           main delivers it
    free ------------------------> filling ------------------> leased
     ^                                |                          |
     |      a newer iteration began   |    (few left: a copy)    |
     +--------------------------------+--------------------------+  the last tensor over it is gone

A worker that finds no free slot, or whose items do not fit, sends them through the message queue.

Guarantee: a slot is written to only while no tensor, view or array over it is left in the main process, and no CUDA
device reads it. Not covered: a process that was forked while a batch was held must clone data that it wants to keep.
"""

from __future__ import annotations

import mmap
import pickle
import weakref
from collections import deque
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from stream_dataloader._engine.assembly.page_lock import LockedPages, PendingCopies, lock_pages
from stream_dataloader._engine.assembly.slots import MOST_STEPS_A_MESSAGE, PAGE_BYTES, Geometry, Slot, Slots, aligned
from stream_dataloader._engine.items.layout import Layout
from stream_dataloader._engine.memory.fields import Carver, SharedFields
from stream_dataloader._engine.memory.pickling import dumps_home
from stream_dataloader._engine.memory.shared_memory import SharedFile

_FREE, _FILLING, _LEASED = range(3)
_UNKNOWN, _READY, _REFUSED = range(3)
_TURN_BITS = 42  # of turn and slot: a thousand batches a second for thirty years
_SESSION_MASK = (1 << (63 - _TURN_BITS)) - 1


class SlotPool(SharedFields):
    """State that all processes share: the slots' file, the state of each slot, and the step that it holds.

    At most `messages` messages of one worker are in transit. Raises `OSError` if the system has no memory for it.
    """

    def __init__(self, lanes: int, messages: int) -> None:
        self._lanes = lanes
        self._messages = messages
        super().__init__()
        self._file = SharedFile()

    def _lay_out(self, carve: Carver) -> None:
        steps_in_flight = self._messages * MOST_STEPS_A_MESSAGE
        self._state = carve(1).data  # whether there are slots: unknown, ready or refused
        self._begin = carve(1).data  # start of the first slot in the file, behind the pickled geometry
        self._slots = carve(1).data  # number of slots
        self._session = carve(1).data  # the newest session that claimed a slot
        self._entries = carve(steps_in_flight).data  # the slot of each step; see `find`
        self._slot_states_at = carve.end_bytes
        self.slot_states = carve(steps_in_flight + MOST_STEPS_A_MESSAGE, dtype=np.uint8).data  # free, filling or leased

    @cached_property
    def memory(self) -> mmap.mmap:
        """The slots' file, once there is a geometry."""
        return self._file.map()

    @property
    def refused(self) -> bool:
        """Whether there was not enough memory for slots."""
        return self._state[0] == _REFUSED

    @property
    def laid_out(self) -> bool:
        """Whether there are slots."""
        return self._state[0] == _READY

    def offer(self, layout: Layout, time_steps: int, whole_windows: bool) -> Geometry | None:
        """Return the slots' geometry, which the first call sets by its arguments; None if there can be no slots."""
        if self._state[0] == _UNKNOWN:
            with self._memory.locked():
                if self._state[0] == _UNKNOWN:
                    self._make(layout, time_steps, whole_windows)
        return self.geometry

    def _make(self, layout: Layout, time_steps: int, whole_windows: bool) -> None:
        geometry = Geometry(layout, time_steps, self._lanes, whole_windows)
        slots = self._messages * geometry.most_steps + geometry.most_held
        try:
            pickled = dumps_home((layout, time_steps, self._lanes, whole_windows))
            begin = aligned(len(pickled), PAGE_BYTES)
            self._file.grow(begin + slots * geometry.slot_bytes)
            self.memory[: len(pickled)] = pickled
        except Exception:  # Too little memory, or a layout that cannot be pickled: items then go through the queue.
            self._state[0] = _REFUSED
        else:
            self._begin[0], self._slots[0] = begin, slots
            self._state[0] = _READY  # written last, so that a process that sees it sees the other fields, too

    @cached_property
    def geometry(self) -> Geometry | None:
        """Layout of a slot's memory; None if there are no slots. May be read only once that is decided."""
        if not self.laid_out:
            return None
        return Geometry(*pickle.loads(self.memory[: self._begin[0]]))

    @property
    def most_steps(self) -> int:
        """The most steps in one message whose windows are in slots."""
        return 1 if self.geometry is None else self.geometry.most_steps

    @cached_property
    def slots(self) -> int:
        """Number of slots."""
        return self._slots[0]

    def offset(self, slot: int) -> int:
        """Return the offset of a slot in the memory."""
        assert self.geometry is not None
        return self._begin[0] + slot * self.geometry.slot_bytes

    def claim(self, session: int, step: int) -> int | None:
        """Claim the slot of a step, for a worker that writes to it; return None if no slot is free.

        The first claim of a new session frees the slots that the one before was filling, as its workers write no more.
        """
        if (slot := self.find(session, step)) is not None:
            return slot
        memory = self._memory
        with memory.locked():
            if (slot := self.find(session, step)) is not None:
                return slot
            if self._session[0] < session:
                self._session[0] = session
                states = np.asarray(self.slot_states)
                states[states == _FILLING] = _FREE
            slot = memory.find(_FREE, self._slot_states_at, self._slot_states_at + self.slots)
            if slot is None or self._session[0] > session:
                return None
            self.slot_states[slot] = _FILLING
            turn, place = divmod(step, len(self._entries))
            self._entries[place] = (session & _SESSION_MASK) << _TURN_BITS | turn << self._slot_bits | slot + 1
            return slot

    def find(self, session: int, step: int) -> int | None:
        """Return the slot of a step, if it has one.

        Session, step and slot are packed into one word, which is read and written in one piece. The word's place is
        the step modulo the number of entries, and the turn is the quotient. Bits for the slot are taken from those for
        the turn.
        """
        turn, place = divmod(step, len(self._entries))
        slot = self._entries[place] - ((session & _SESSION_MASK) << _TURN_BITS | turn << self._slot_bits) - 1
        return slot if 0 <= slot < len(self.slot_states) else None

    @cached_property
    def _slot_bits(self) -> int:
        return len(self.slot_states).bit_length()  # enough for all slots, numbered from 1

    def __getstate__(self) -> dict[str, Any]:
        names = ("_lanes", "_messages", "_memory", "_file")
        return {name: self.__dict__[name] for name in names}


class PooledSlots(Slots):
    """The slots that workers share, for one session."""

    there = True

    def __init__(self, pool: SlotPool, session: int, whole_windows: bool) -> None:
        super().__init__(whole_windows)
        self._pool = pool
        self._session = session
        self._fitting: Layout | None = None  # the last layout offered that is equal to the slots'
        self._slots: dict[int, Slot] = {}

    def offer(self, step: int, layout: Layout, time_steps: int) -> Slot | None:
        """See `Slots`."""
        pool = self._pool
        geometry = pool.geometry if layout is self._fitting else pool.offer(layout, time_steps, self.whole_windows)
        if geometry is None or time_steps > geometry.time_steps:
            return None
        if layout is not self._fitting:
            if geometry.layout != layout or geometry.whole_windows != self.whole_windows:
                return None
            self._fitting = layout
        number = pool.claim(self._session, step)
        if number is not None and number not in self._slots:
            self._slots[number] = geometry.slot(pool.memory, pool.offset(number))
        return None if number is None else self._slots[number]


class _Lease(weakref.ref[np.ndarray[Any, Any]]):
    """Watches the array under a batch's tensors."""

    __slots__ = ("slot",)
    slot: int


class SlotLeases:
    """Leases slots to batches."""

    def __init__(self, pool: SlotPool, *, pin_memory: bool = False) -> None:
        self.pool = pool
        self.unfit = False  # whether no item of the last iteration fits the slots
        self.copies = 0  # number of batches that were copied
        self._to_be_locked = pin_memory and torch.cuda.is_available()
        self._device: torch.device | None = None
        self._memory: LockedPages | None = None  # the pool's
        self._copies = PendingCopies()
        self._leases: dict[int, _Lease] = {}
        self._over: deque[_Lease] = deque()  # leases whose array is gone

    def lock_for(self, device: torch.device) -> None:
        """Page-lock the slots' memory when the next slot is leased, because it will be copied to a CUDA device."""
        if self._device is None:
            self._device = device
            self._to_be_locked = self._memory is None and torch.cuda.is_available()

    def lease(self, session: int, step: int) -> Slot | None:
        """Lease the slot of a step that all workers are done with; return None if the step has none.

        The slot is free again when no array over it is left. When few slots are left, return a copy.
        """
        slot = self.pool.find(session, step)
        self.unfit = slot is None and self.pool.laid_out and (step == 0 or self.unfit)
        if slot is None:
            return None
        if self._to_be_locked:
            self._to_be_locked = False
            self._memory = lock_pages(self.pool.memory, self._copies, self._device)
        self.release()
        if self._copies.waiting:
            self._copies.poll()
        geometry = self.pool.geometry
        assert geometry is not None
        # All arrays of the batch lie over this one, which numpy and torch keep alive as long as any of them.
        under = self.pool.memory if self._memory is None else self._memory
        memory = np.ndarray(geometry.slot_bytes, np.uint8, under, self.pool.offset(slot))
        if len(self._leases) - len(self._copies.waiting) < geometry.most_held:
            lease = _Lease(memory, self._over.append)
            lease.slot = slot
            self._leases[slot] = lease
            self.pool.slot_states[slot] = _LEASED
        else:
            memory = memory.copy()
            self.copies += 1
            self.pool.slot_states[slot] = _FREE
        return geometry.slot(memory)

    @property
    def in_use(self) -> int:
        """Number of slots that are held by batches, or being filled."""
        return int(np.count_nonzero(self.pool.slot_states[: self.pool.slots])) - len(self._over)

    def release(self) -> None:
        """Free slots whose arrays are all gone, once no device reads them.

        An interrupt may come anywhere here; the next call does the rest.
        """
        while self._over:
            self._copies.free_after(partial(_give_back, self.pool, self._leases, self._over[0]))
            self._over.popleft()


def _give_back(pool: SlotPool, leases: dict[int, _Lease], lease: _Lease) -> None:
    """Free the slot of a lease; a function, as a bound method would keep `SlotLeases` alive with its slots."""
    if leases.get(lease.slot) is lease:
        # If an earlier call was interrupted after it set the slot free, the slot may have another owner by now.
        if pool.slot_states[lease.slot] == _LEASED:
            pool.slot_states[lease.slot] = _FREE
        del leases[lease.slot]
