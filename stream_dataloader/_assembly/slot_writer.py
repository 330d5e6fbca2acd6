"""A reader's side of the memory that whole batches are put together in: slots that processes share, or this process's.

Guarantee: a reader writes to its own lanes only. Where there is no room for its windows, they go another way.
"""

from __future__ import annotations

from typing import TypeAlias

from stream_dataloader._assembly.block import Block, new_column
from stream_dataloader._assembly.slot_pool import SlotPool
from stream_dataloader._assembly.slots import Slot
from stream_dataloader._items.layout import Layout


class PooledSlots:
    """The slots that workers share, for one session.

    Args:
        pool: The slots.
        session: The session's number.
        whole_windows: Each lane's window is to lie in one piece.
    """

    def __init__(self, pool: SlotPool, session: int, *, whole_windows: bool) -> None:
        self._pool = pool
        self._session = session
        self._whole_windows = whole_windows
        self._fitting: Layout | None = None  # equal to the slots', and the last one asked for
        self._slots: dict[int, Slot] = {}

    def offer(self, step: int, layout: Layout, time_steps: int) -> Slot | None:
        """The slot of a step; None if windows of this layout do not fit, or no slot is free."""
        pool = self._pool
        geometry = pool.geometry if layout is self._fitting else pool.offer(layout, time_steps)
        if geometry is None or time_steps > geometry.time_steps:
            return None
        if layout is not self._fitting:
            if geometry.layout != layout:
                return None
            self._fitting = layout
        number = pool.claim(self._session, step)
        if number is not None and number not in self._slots:
            self._slots[number] = geometry.slot(pool.memory, pool.offset(number), whole_windows=self._whole_windows)
        return None if number is None else self._slots[number]


class SharedSlot:
    """Memory of this process that several readers put a batch together in, one step after the other."""

    def __init__(self, lanes: int, *, whole_windows: bool) -> None:
        self._lanes = lanes
        self._whole_windows = whole_windows
        self._step = -1
        self._slot: Slot | None = None

    def offer(self, step: int, layout: Layout, time_steps: int) -> Slot | None:
        """The slot of a step: of this layout, if it is the first that comes; None if windows do not fit."""
        if self._slot is None or self._step != step:
            columns = [
                None
                if spec.dtype is None
                else new_column(spec, time_steps, self._lanes, whole_windows=self._whole_windows)
                for spec in layout.specs
            ]
            self._step, self._slot = step, Slot(layout, time_steps, self._lanes, columns)
        slot = self._slot
        fits = time_steps <= slot.time_steps and (slot.layout is layout or slot.layout == layout)
        return slot if fits else None

    def taken(self, step: int) -> Slot | None:
        """The slot of a step, which is the batch's from now on; None if nobody wrote to one."""
        slot, self._slot = self._slot, None
        return slot if self._step == step else None


#: Where the windows of a batch are put together.
Slots: TypeAlias = PooledSlots | SharedSlot


class SlotWriter:
    """What one reader writes to.

    Args:
        slots: Where the windows of all readers go.
        lanes: The reader's lanes.
    """

    def __init__(self, slots: Slots, lanes: range) -> None:
        self._slots = slots
        self._lanes = lanes

    def block(self, step: int, layout: Layout, time_steps: int) -> Block | None:
        """Room in the step's slot; None if windows of this layout do not fit, or no slot is free."""
        slot = self._slots.offer(step, layout, time_steps)
        if slot is None:
            return None
        rows = slot.rows(self._lanes)
        columns = [  # objects have no place in the slot: their lists are sent
            new_column(spec, rows.time_steps, rows.lanes) if column is None else column
            for spec, column in zip(layout.specs, rows.columns, strict=True)
        ]
        return Block(layout, columns, [0] * rows.lanes, rows.time_steps, time_steps)

    def left(self, block: Block) -> list[Block]:
        """What is left to be sent of windows that are all in the slot."""
        if None not in block.layout.dtypes:
            return []
        # of arrays nothing is sent, but the place in the list is kept: columns go by their number
        columns = [column[: block.time_steps] if type(column) is list else [] for column in block.columns]
        return [Block(block.layout, columns, block.counts, block.capacity, block.time_steps)]
