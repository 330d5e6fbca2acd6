"""The ring: slots of shared memory in which workers put batches together in place.

A slot holds one whole batch, bookkeeping and all, and goes round::

            a worker begins a step           main delivers it
    free ------------------------> filling ------------------> leased
     ^                                |                          |
     |      a newer iteration began   |    (few left: a copy)    |
     +--------------------------------+--------------------------+  the last tensor over it is gone

The first item read, by whichever worker, decides where things lie in a slot; the file grows then. A worker
that finds no free slot, or whose items do not fit, sends them through torch's queue instead: nobody waits.

Guarantees: a slot is written to only while no tensor, view or array over it is left in the main process; a
worker is never kept waiting for one. Not covered: a process forked while a batch is held, which shares it;
it must clone what it wants to keep.
"""

from __future__ import annotations

import functools
import mmap
import os
import pickle
import weakref
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from stream_dataloader._assembly.page_lock import PendingCopies, lock_pages
from stream_dataloader._items.layout import Layout, storage_dtype
from stream_dataloader._memory.fields import Carver, bytes_of
from stream_dataloader._memory.pickling import dumps_home
from stream_dataloader._memory.shared_memory import SharedFile, SharedMemory

Array = np.ndarray[Any, Any]

MOST_STEPS_A_MESSAGE = 16
MESSAGE_BYTES = 1 << 20  # a message carries several steps only up to so much
_STEPS_BYTES = 4 << 20  # and up to so much in slots: several batches a message are several in memory
_HELD = 3  # batches that a user may hold before copies are handed out: the one in use, the last, one of a trainer's
_ALIGNMENT, _PAGE = 64, 4096
_FREE, _FILLING, _LEASED = range(3)
_UNKNOWN, _READY, _REFUSED = range(3)
_BOOKKEEPING: tuple[type, ...] = (np.int64, np.int64, np.bool_, np.bool_)  # source, position, mask, is_start


def _aligned(offset: int, to: int = _ALIGNMENT) -> int:
    return -(-offset // to) * to


class Slot(NamedTuple):
    """Arrays over the memory of one batch, `(T, B)` and `(T, B, ...)`; None for a leaf that is an object."""

    layout: Layout
    source: Array
    position: Array
    mask: Array
    is_start: Array
    columns: list[Any]


class Geometry:
    """Where things lie in a slot: a pure function of layout, T and B.

    Attributes:
        layout: What items look like.
        time_steps: T, the most that fits.
        slot_bytes: Size of a slot.
        most_steps: How many steps a message may carry.
    """

    def __init__(self, layout: Layout, time_steps: int, lanes: int) -> None:
        self.layout, self.time_steps = layout, time_steps
        self._lanes = lanes
        self._places: list[tuple[tuple[int, ...], np.dtype[Any], int] | None] = []
        end = 0
        kinds: list[tuple[Any, tuple[int, ...]]] = [(kind, ()) for kind in _BOOKKEEPING]
        kinds += [(None if spec.dtype is None else storage_dtype(spec.dtype), spec.shape) for spec in layout.specs]
        for kind, shape in kinds:
            if kind is None:
                self._places.append(None)
                continue
            dtype, begin = np.dtype(kind), _aligned(end)
            self._places.append((shape, dtype, begin))
            end = begin + time_steps * lanes * int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self.slot_bytes = _aligned(end, _PAGE)
        self.most_steps = min(max(_STEPS_BYTES // self.slot_bytes, 1), MOST_STEPS_A_MESSAGE)

    def slot(self, memory: Any, offset: int = 0, *, by_lane: bool = False) -> Slot:
        """Arrays over `memory`, which they keep alive.

        Args:
            offset: Where in the memory the slot begins.
            by_lane: Each lane's window of a leaf lies in one piece, instead of each time step's lanes.
        """
        head, arrays = (self.time_steps, self._lanes), list[Any]()
        for i, place in enumerate(self._places):
            if place is None:
                arrays.append(None)
                continue
            shape, dtype, begin = place
            if by_lane and i >= len(_BOOKKEEPING):
                array = np.ndarray((*head[::-1], *shape), dtype, memory, offset + begin).swapaxes(0, 1)
            else:
                array = np.ndarray((*head, *shape), dtype, memory, offset + begin)
            arrays.append(array)
        source, position, mask, is_start = arrays[: len(_BOOKKEEPING)]
        return Slot(self.layout, source, position, mask, is_start, arrays[len(_BOOKKEEPING) :])


class _Control:
    """What is known of the slots.

    Attributes:
        state: Whether there are slots: unknown, ready or refused.
        pickled_bytes: Length of the pickled layout, at the file's start.
        time_steps: T, the most that fits.
        slots: How many slots there are.
        session: The newest session that claimed one.
        entries: Which step is in which slot, by step modulo their number; see `_entry`.
        slot_states: What each slot is: free, being filled or leased.
        slot_states_at: Where that begins in the memory.
    """

    def __init__(self, carve: Carver, steps_in_flight: int) -> None:
        self.state = carve(1)
        self.pickled_bytes = carve(1)
        self.time_steps = carve(1)
        self.slots = carve(1)
        self.session = carve(1)
        self.entries = carve(steps_in_flight)
        self.slot_states_at = carve.end_bytes
        self.slot_states = carve(steps_in_flight + MOST_STEPS_A_MESSAGE, dtype=np.uint8)


class Ring:
    """What all processes share: the slots' file, their states, and which step is in which slot.

    Args:
        lanes: Lanes of the batch, B.
        messages: Most messages of one worker that can be on their way at once.

    Raises:
        OSError: The system offers no memory for it.
    """

    def __init__(self, lanes: int, messages: int) -> None:
        self._lanes, self._messages = lanes, messages
        self._memory_of_control = SharedMemory(bytes_of(self._lay_out_control))
        self._file = SharedFile()

    def _lay_out_control(self, carve: Carver) -> _Control:
        return _Control(carve, self._messages * MOST_STEPS_A_MESSAGE)

    @cached_property
    def _control(self) -> _Control:
        return self._lay_out_control(Carver(self._memory_of_control.buffer))

    @cached_property
    def memory(self) -> mmap.mmap:
        """The slots' file, once there is a geometry."""
        return self._file.map()

    @property
    def refused(self) -> bool:
        """There was not enough memory for slots."""
        return bool(self._control.state[0] == _REFUSED)

    @property
    def laid_out(self) -> bool:
        """There are slots."""
        return bool(self._control.state[0] == _READY)

    def offer(self, layout: Layout, time_steps: int) -> Geometry | None:
        """The geometry: of this layout, if it is the first, else the one there is; None if there can be none."""
        state = self._control.state
        if state[0] == _UNKNOWN:
            with self._memory_of_control.locked():
                if state[0] == _UNKNOWN:
                    self._lay_out(layout, time_steps)
        return self.geometry

    def _lay_out(self, layout: Layout, time_steps: int) -> None:
        geometry = Geometry(layout, time_steps, self._lanes)
        slots = self._messages * geometry.most_steps + max(_HELD, geometry.most_steps)
        try:
            pickled = dumps_home(layout)
            self._file.grow(_aligned(len(pickled), _PAGE) + slots * geometry.slot_bytes)
            self.memory[: len(pickled)] = pickled
        except Exception:  # too little memory, or a layout that cannot be pickled: items go through the queue
            self._control.state[0] = _REFUSED
        else:
            control = self._control
            control.pickled_bytes[0], control.time_steps[0], control.slots[0] = len(pickled), time_steps, slots
            control.state[0] = _READY  # last: who sees it sees the rest

    @cached_property
    def geometry(self) -> Geometry | None:
        """Where things lie in a slot; None if there are no slots. Asked for only when that is decided."""
        control = self._control
        if control.state[0] != _READY:
            return None
        layout = pickle.loads(self.memory[: int(control.pickled_bytes[0])])
        return Geometry(layout, int(control.time_steps[0]), self._lanes)

    @property
    def most_steps(self) -> int:
        """How many steps a message may carry whose windows are in slots."""
        return 1 if self.geometry is None else self.geometry.most_steps

    @cached_property
    def slots(self) -> int:
        """How many slots there are."""
        return int(self._control.slots[0])

    def offset(self, slot: int) -> int:
        """Where a slot begins in the memory."""
        assert self.geometry is not None
        return _aligned(int(self._control.pickled_bytes[0]), _PAGE) + slot * self.geometry.slot_bytes

    def claim(self, session: int, step: int) -> int | None:
        """The slot of a step, for a worker that writes to it; None if none is free.

        The first worker of a session comes when those of the session before write no more: what they were
        filling is free.
        """
        if (slot := self.find(session, step)) is not None:
            return slot
        control, memory = self._control, self._memory_of_control
        with memory.locked():
            if (slot := self.find(session, step)) is not None:
                return slot
            if control.session[0] < session:
                control.session[0] = session
                control.slot_states[control.slot_states == _FILLING] = _FREE
            slot = memory.find(_FREE, control.slot_states_at, control.slot_states_at + self.slots)
            if slot is None or control.session[0] > session:
                return None
            control.slot_states[slot] = _FILLING
            control.entries[step % len(control.entries)] = _entry(session, step, slot)
            return slot

    def find(self, session: int, step: int) -> int | None:
        """The slot of a step, if it has one."""
        entries = self._control.entries
        entry = int(entries[step % len(entries)])
        slot = (entry & 0xFFFF) - 1
        return slot if entry == _entry(session, step, slot) and slot >= 0 else None

    def set_leased(self, slot: int, leased: bool) -> None:
        """Take a slot that was filled out of the ring, or give it back; for the main process."""
        self._control.slot_states[slot] = _LEASED if leased else _FREE

    def __getstate__(self) -> dict[str, Any]:
        names = ("_lanes", "_messages", "_memory_of_control", "_file")
        return {name: self.__dict__[name] for name in names}


def _entry(session: int, step: int, slot: int) -> int:
    """Session, step and slot in one word, which is read and written in one piece."""
    return (session & 0x7FFF) << 48 | (step & 0xFFFFFFFF) << 16 | (slot + 1)


class _Lease(weakref.ref[Array]):
    """Watches the array under a batch's tensors."""

    slot: int


class RingReader:
    """The main process's end: leases slots to batches.

    Args:
        ring: The shared side.
        pin_memory: Have the slots' memory page-locked, where there is CUDA.

    Attributes:
        ring: The shared side.
        unfit: Nothing of the iteration that asked last fits the slots.
    """

    def __init__(self, ring: Ring, *, pin_memory: bool = False) -> None:
        self.ring = ring
        self.unfit = False
        self._to_be_locked = pin_memory and torch.cuda.is_available()
        self._copies: list[PendingCopies] = []  # one, once the memory is page-locked
        self._leases: dict[int, _Lease] = {}
        self._release = _releaser(ring, self._leases, self._copies)

    def lease(self, session: int, step: int, *, by_lane: bool) -> Slot | None:
        """The slot of a step that all workers are done with; None if it has none.

        It is free again when no array over it is left. When few are left, it is a copy.
        """
        slot = self.ring.find(session, step)
        self.unfit = slot is None and self.ring.laid_out and (step == 0 or self.unfit)
        if slot is None:
            return None
        if self._to_be_locked:
            self._to_be_locked = False
            if lock_pages(self.ring.memory):
                self._copies.append(PendingCopies())
        for copies in self._copies:
            copies.poll()
        geometry = self.ring.geometry
        assert geometry is not None
        memory = np.ndarray(geometry.slot_bytes, np.uint8, self.ring.memory, self.ring.offset(slot))
        if len(self._leases) < max(_HELD, geometry.most_steps):
            lease = _Lease(memory, self._release)
            lease.slot = slot
            self._leases[slot] = lease
            self.ring.set_leased(slot, True)
        else:
            memory = memory.copy()
            self.ring.set_leased(slot, False)
        return geometry.slot(memory, by_lane=by_lane)


def _releaser(ring: Ring, leases: dict[int, _Lease], pending: list[PendingCopies]) -> Callable[[Any], None]:
    owner, getpid = os.getpid(), os.getpid

    def release(lease: Any) -> None:
        if getpid() != owner or leases.pop(lease.slot, None) is None:  # in a process that was forked meanwhile
            return
        give_back = functools.partial(ring.set_leased, lease.slot, False)
        if pending:
            pending[0].free_after(give_back)
        else:
            give_back()

    return release
