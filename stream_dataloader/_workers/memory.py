"""The memory that a loader's batches are put together in: slots, which workers fill and batches lease.

Guarantee: where there is none, batches come in another way, with a warning, or with an error if the user insists.
"""

from __future__ import annotations

import torch

from stream_dataloader._assembly.slot_pool import SlotLeases, SlotPool
from stream_dataloader._assembly.slots import Slot
from stream_dataloader._notices import warn
from stream_dataloader._workers.settings import WorkerSettings
from stream_dataloader._workers.tally import Tally


class BatchMemory:
    """Slots for the batches of one loader; `otherwise` is the way without them."""

    def __init__(self, lanes: int, messages: int, settings: WorkerSettings, tally: Tally, otherwise: str) -> None:
        self._lanes = lanes
        self._messages = messages
        self._transport = settings.transport
        self._pin_memory = settings.pin_memory
        self._tally = tally
        self._otherwise = otherwise
        self._device: torch.device | None = None
        self.leases: SlotLeases | None = None

    @property
    def unfit(self) -> bool:
        """Nothing of the iteration that asked last fits the slots."""
        return self.leases is not None and self.leases.unfit

    @property
    def in_use(self) -> tuple[int, int]:
        """How many slots are in use, and how many there are."""
        leases = self.leases
        return (0, 0) if leases is None or not leases.pool.laid_out else (leases.in_use, leases.pool.slots)

    def forget(self) -> None:
        """Have other slots the next time, which nobody has seen."""
        self.leases = None

    def ready(self) -> SlotPool | None:
        """What workers share, made now if it is not there yet; None if there are no slots.

        Raises:
            RuntimeError: There is no memory, and the user insists on it.
        """
        if self.leases is None and self._transport != "queue":
            try:
                self.leases = SlotLeases(SlotPool(self._lanes, self._messages), pin_memory=self._pin_memory)
            except OSError as error:
                self._do_without(error)
            else:
                self.lock_for(self._device)
        return None if self.leases is None else self.leases.pool

    def release(self) -> None:
        """Free the slots of batches that are gone, once what was begun on the current CUDA stream is done."""
        if self.leases is not None:
            self.leases.release()

    def lock_for(self, device: torch.device | None) -> None:
        """Have it page-locked from now on, as batches are copied to a CUDA device."""
        self._device = device
        if self.leases is not None and device is not None:
            self.leases.lock_for(device)

    def _do_without(self, reason: object) -> None:
        problem = f"there is no shared memory for batches ({reason})"
        if self._transport == "shared_memory":
            raise RuntimeError(f'{problem}; pass transport="auto" to have them {self._otherwise}')
        text = f"{problem}; they are {self._otherwise}, which is slower"
        warn(text, 5)
        self._transport = "queue"

    def slot(self, leases: SlotLeases | None, session: int, step: int) -> Slot | None:
        """The slot of a step that all workers of a session are done with, if any."""
        if leases is None:
            return None
        copies = leases.copies
        slot = leases.lease(session, step)
        self._tally.counts["copies"] += leases.copies - copies
        if slot is None and leases.pool.refused and self._transport != "queue":
            self._do_without("it could not be made large enough")
        return slot
