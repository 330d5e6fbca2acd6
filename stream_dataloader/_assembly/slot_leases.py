"""The main process's side of the slots: a batch leases the slot that its tensors lie in.

Guarantee: a slot is given back when the last array over it is gone and no CUDA device reads it any more, and not
before; one that is not lent is a copy.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from stream_dataloader._assembly.page_lock import LockedPages, PendingCopies, lock_pages
from stream_dataloader._assembly.slot_pool import SlotPool
from stream_dataloader._assembly.slots import Slot


class _Lease(weakref.ref[np.ndarray[Any, Any]]):
    """Watches the array under a batch's tensors."""

    slot: int


class SlotLeases:
    """Leases slots to batches.

    Args:
        pool: The shared side.
        pin_memory: Have the slots' memory page-locked, where there is CUDA.

    Attributes:
        pool: The shared side.
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
        self._release = _releaser(pool, self._leases, self._copies)

    def lock_for(self, device: torch.device) -> None:
        """Have the slots' memory page-locked when the next slot is leased, as it is copied to a CUDA device."""
        if self._device is None:
            self._device = device
            self._to_be_locked = self._memory is None and torch.cuda.is_available()

    def lease(self, session: int, step: int, *, whole_windows: bool) -> Slot | None:
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
        self._copies.poll()
        geometry = self.pool.geometry
        assert geometry is not None
        # the one array under all the batch's: numpy and torch keep it alive for as long as any of them lives
        under = self.pool.memory if self._memory is None else self._memory
        memory = np.ndarray(geometry.slot_bytes, np.uint8, under, self.pool.offset(slot))
        if len(self._leases) < geometry.most_held:
            lease = _Lease(memory, self._release)
            lease.slot = slot
            self._leases[slot] = lease
            self.pool.set_leased(slot, True)
        else:
            memory = memory.copy()
            self.copies += 1
            self.pool.set_leased(slot, False)
        return geometry.slot(memory, whole_windows=whole_windows)


def _releaser(pool: SlotPool, leases: dict[int, _Lease], copies: PendingCopies) -> Callable[[Any], None]:
    """What a lease that died calls: a function of its own, which does not keep the `SlotLeases` alive."""
    owner = os.getpid()
    getpid = os.getpid  # by itself: at the interpreter's end the module may be gone

    def release(lease: Any) -> None:
        if getpid() != owner or leases.pop(lease.slot, None) is None:  # in a process that was forked meanwhile
            return
        copies.free_after(functools.partial(pool.set_leased, lease.slot, False))

    return release
