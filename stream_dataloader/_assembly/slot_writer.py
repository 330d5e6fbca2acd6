"""A reader's side of the memory that whole batches are put together in: slots that processes share, or this process's.

Guarantee: a reader writes to its own lanes only. Where there is no room for its windows, they go another way.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable

from stream_dataloader._assembly.block import Block, new_column
from stream_dataloader._assembly.slot_pool import SlotPool
from stream_dataloader._assembly.slots import Slot
from stream_dataloader._items.layout import Layout


class Slots:
    """Where the windows of a batch are put together, as one reader sees it."""

    @abstractmethod
    def block(self, step: int, layout: Layout, time_steps: int) -> Block | None:
        """Room in the step's slot; None if windows of this layout do not fit, or no slot is free."""

    def left(self, block: Block) -> list[Block]:
        """What is left to be sent of windows that are all in the slot."""
        if None not in block.layout.dtypes:
            return []
        # of arrays nothing is sent, but the place in the list is kept: columns go by their number
        columns = [column[: block.time_steps] if type(column) is list else [] for column in block.columns]
        return [Block(block.layout, columns, block.counts, block.capacity, block.time_steps)]


class SlotWriter(Slots):
    """A worker's side of the slots, for one session.

    Args:
        lanes: The worker's lanes.
        session: The session's number.
        whole_windows: Each lane's window is to lie in one piece.
    """

    def __init__(self, pool: SlotPool, lanes: range, session: int, *, whole_windows: bool) -> None:
        self._pool = pool
        self._session = session
        self._whole_windows = whole_windows
        self._lanes = lanes
        self._fitting: Layout | None = None  # equal to the slots', and the last one asked for
        self._slots: dict[int, Slot] = {}

    def block(self, step: int, layout: Layout, time_steps: int) -> Block | None:
        """See `Slots`."""
        pool = self._pool
        if layout is not self._fitting:
            geometry = pool.offer(layout, time_steps)
            if geometry is None or geometry.layout != layout:
                return None
            self._fitting = layout
        geometry = pool.geometry
        assert geometry is not None
        if time_steps > geometry.time_steps or (number := pool.claim(self._session, step)) is None:
            return None
        return _block_in(self.slot(number), layout, time_steps)

    def slot(self, number: int) -> Slot:
        """This worker's rows of a slot."""
        slot = self._slots.get(number)
        if slot is None:
            assert self._pool.geometry is not None
            whole = self._pool.geometry.slot(
                self._pool.memory, self._pool.offset(number), whole_windows=self._whole_windows
            )
            slot = self._slots[number] = whole.rows(self._lanes)
        return slot


def slots_of(pool: SlotPool | None, session: int, *, whole_windows: bool) -> Callable[[range], Slots] | None:
    """What says where the windows of some lanes go in a session; None: with the parts."""
    if pool is None:
        return None
    return functools.partial(SlotWriter, pool, session=session, whole_windows=whole_windows)


class SharedSlot:
    """Memory of this process that several readers put a batch together in, one step after the other."""

    def __init__(self, lanes: int, *, whole_windows: bool) -> None:
        self._lanes = lanes
        self._whole_windows = whole_windows
        self._step = -1
        self._slot: Slot | None = None

    def of(self, lanes: range) -> SharedSlotWriter:
        """What a reader of some lanes writes to."""
        return SharedSlotWriter(self, lanes)

    def offer(self, step: int, layout: Layout, time_steps: int) -> Slot:
        """The slot of a step: of this layout, if it is the first that comes."""
        if self._slot is None or self._step != step:
            columns = [
                None
                if spec.dtype is None
                else new_column(spec, time_steps, self._lanes, whole_windows=self._whole_windows)
                for spec in layout.specs
            ]
            self._step, self._slot = step, Slot(layout, time_steps, self._lanes, columns)
        return self._slot

    def taken(self, step: int) -> Slot | None:
        """The slot of a step, which is the batch's from now on; None if nobody wrote to one."""
        slot, self._slot = self._slot, None
        return slot if self._step == step else None


class SharedSlotWriter(Slots):
    """One reader's side of a `SharedSlot`."""

    def __init__(self, shared: SharedSlot, lanes: range) -> None:
        self._shared, self._lanes = shared, lanes

    def block(self, step: int, layout: Layout, time_steps: int) -> Block | None:
        """See `Slots`."""
        slot = self._shared.offer(step, layout, time_steps)
        if time_steps > slot.time_steps or (slot.layout is not layout and slot.layout != layout):
            return None
        return _block_in(slot.rows(self._lanes), layout, time_steps)


def _block_in(rows: Slot, layout: Layout, time_steps: int) -> Block:
    """Room for a reader's windows in its rows of a slot."""
    columns = [  # objects have no place in the slot: their lists are sent
        new_column(spec, rows.time_steps, rows.lanes) if column is None else column
        for spec, column in zip(layout.specs, rows.columns, strict=True)
    ]
    return Block(layout, columns, [0] * rows.lanes, rows.time_steps, time_steps)
