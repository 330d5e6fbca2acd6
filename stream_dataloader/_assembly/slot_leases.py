"""The main process's side of the slots: a batch leases the slot that its tensors lie in.

Guarantee: a slot is given back once the last array over it is gone and no CUDA device reads it any more, and not
before: where the next batch is asked for, as no Python code may run where an array goes (`_memory/endings.py`). One
that is not lent is a copy.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from typing import Any

import numpy as np
import torch

from stream_dataloader._assembly.page_lock import LockedPages, PendingCopies, lock_pages
from stream_dataloader._assembly.slot_pool import SlotPool
from stream_dataloader._assembly.slots import Slot


class _Lease(weakref.ref[np.ndarray[Any, Any]]):
    """Watches the array under a batch's tensors."""

    __slots__ = ("slot",)
    slot: int


class SlotLeases:
    """Leases slots to batches.

    Attributes:
        unfit: Nothing of the iteration that asked last fits the slots.
        copies: How many batches were copied.
    """

    def __init__(self, pool: SlotPool, *, pin_memory: bool = False) -> None:
        self.pool = pool
        self.unfit = False
        self.copies = 0
        self._to_be_locked = pin_memory and torch.cuda.is_available()
        self._device: torch.device | None = None
        self._memory: LockedPages | None = None  # the pool's
        self._copies = PendingCopies()
        self._leases: dict[int, _Lease] = {}
        self._over: deque[_Lease] = deque()  # those whose array is gone

    def lock_for(self, device: torch.device) -> None:
        """Have the slots' memory page-locked when the next slot is leased, as it is copied to a CUDA device."""
        if self._device is None:
            self._device = device
            self._to_be_locked = self._memory is None and torch.cuda.is_available()

    def lease(self, session: int, step: int) -> Slot | None:
        """The slot of a step that all workers are done with; None if it has none.

        It is free again when no array over it is left. When few are left, it is a copy.
        """
        slot = self.pool.find(session, step)
        self.unfit = slot is None and self.pool.laid_out and (step == 0 or self.unfit)
        if slot is None:
            return None
        if self._to_be_locked:
            self._to_be_locked = False
            self._memory = lock_pages(self.pool.memory, self._copies, self._device)
        self.release()
        self._copies.poll()
        geometry = self.pool.geometry
        assert geometry is not None
        # the one array under all the batch's: numpy and torch keep it alive for as long as any of them lives
        under = self.pool.memory if self._memory is None else self._memory
        memory = np.ndarray(geometry.slot_bytes, np.uint8, under, self.pool.offset(slot))
        if len(self._leases) - self._copies.waiting < geometry.most_held:
            lease = _Lease(memory, self._over.append)
            lease.slot = slot
            self._leases[slot] = lease
            self.pool.lease(slot)
        else:
            memory = memory.copy()
            self.copies += 1
            self.pool.free(slot)
        return geometry.slot(memory)

    @property
    def in_use(self) -> int:
        """How many slots are held by batches, or being filled, at this moment."""
        return self.pool.in_use() - len(self._over)

    def release(self) -> None:
        """Free the slots that no array is left over, once no device reads them.

        An interrupt may come anywhere here: the next call does the rest, and what is done twice does no harm.
        """
        while self._over:
            self._copies.free_after(functools.partial(_give_back, self.pool, self._leases, self._over[0]))
            self._over.popleft()


def _give_back(pool: SlotPool, leases: dict[int, _Lease], lease: _Lease) -> None:
    """Outside of `SlotLeases`, which must not wait to be freed with its slots."""
    if leases.get(lease.slot) is lease:
        pool.give_back(lease.slot)
        del leases[lease.slot]
