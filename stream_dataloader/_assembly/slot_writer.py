"""What readers write windows to: slots that processes share, this process's memory, or each reader's own.

Guarantee: a reader writes to its own lanes only. Where there is no room for its windows, they go another way.
"""

from __future__ import annotations

from stream_dataloader._assembly.block import Block, new_column
from stream_dataloader._assembly.slot_pool import SlotPool
from stream_dataloader._assembly.slots import Slot
from stream_dataloader._items.layout import Layout


class Slots:
    """What the windows of one session are written to. By itself it has no slots: each reader has memory of its own.

    Attributes:
        whole_windows: Windows are wanted lane by lane, for a `collate_fn`: those that streams cut themselves as they
            are, others in one piece each.
        there: There are slots.
    """

    there = False

    def __init__(self, whole_windows: bool = False) -> None:
        self.whole_windows = whole_windows

    def offer(self, step: int, layout: Layout, time_steps: int) -> Slot | None:  # noqa: ARG002
        """The slot of a step; None if windows of this layout do not fit, or no slot is free."""
        return None

    def taken(self, step: int) -> Slot | None:  # noqa: ARG002
        """The slot of a step, if it is this process's: the batch's from now on. None if nobody wrote to one."""
        return None

    def own(self, width: int, layout: Layout, time_steps: int) -> Block:
        """Room for windows in memory of their own; arrays are not initialised."""
        columns = [new_column(spec, time_steps, width, whole_windows=self.whole_windows) for spec in layout.specs]
        return Block(layout, columns, [0] * width, time_steps, time_steps)

    def block(self, lanes: range, step: int, layout: Layout, time_steps: int) -> Block | None:
        """Room for some lanes' windows in the step's slot, as `offer`."""
        slot = self.offer(step, layout, time_steps)
        if slot is None:
            return None
        rows = slot.rows(lanes)
        columns = [  # objects have no place in the slot: their lists are sent
            new_column(spec, rows.time_steps, rows.lanes) if column is None else column
            for spec, column in zip(layout.specs, rows.columns, strict=True)
        ]
        return Block(layout, columns, [0] * rows.lanes, rows.time_steps, time_steps)


class PooledSlots(Slots):
    """The slots that workers share, for one session."""

    there = True

    def __init__(self, pool: SlotPool, session: int, whole_windows: bool) -> None:
        super().__init__(whole_windows)
        self._pool = pool
        self._session = session
        self._fitting: Layout | None = None  # equal to the slots', and the last one asked for
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


class SharedSlot(Slots):
    """Memory of this process that several readers put a batch together in, one step after the other."""

    there = True

    def __init__(self, lanes: int, whole_windows: bool) -> None:
        super().__init__(whole_windows)
        self._lanes = lanes
        self._step = -1
        self._slot: Slot | None = None

    def offer(self, step: int, layout: Layout, time_steps: int) -> Slot | None:
        """The slot of a step: of this layout, if it is the first that comes; None if windows do not fit."""
        if self._slot is None or self._step != step:
            block = self.own(self._lanes, layout, time_steps)
            columns = [None if type(column) is list else column for column in block.columns]
            self._step, self._slot = step, Slot(layout, time_steps, self._lanes, columns)
        slot = self._slot
        fits = time_steps <= slot.time_steps and (slot.layout is layout or slot.layout == layout)
        return slot if fits else None

    def taken(self, step: int) -> Slot | None:
        """See `Slots`."""
        slot, self._slot = self._slot, None
        return slot if self._step == step else None
