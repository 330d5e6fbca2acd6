"""Check that the streams of an epoch fit together in a batch.

Guarantee: the check runs in (step, lane) order, so errors do not depend on the workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from stream_dataloader._engine.assembly.part import Part, runs_of
from stream_dataloader._engine.assembly.slots import Slot
from stream_dataloader._engine.items.layout import Layout
from stream_dataloader._engine.items.structure import ALIKE
from stream_dataloader._engine.schedule.rules import Reader
from stream_dataloader.errors import ItemError, shorten


class LayoutCheck:
    """Keeps the layout of the epoch's items, and compares each part with it."""

    def __init__(self, readers: Sequence[Reader], sources: Sequence[Any]) -> None:
        self._readers = readers
        self._sources = sources
        self.layout: Layout | None = None  # of the epoch's items, once it is known
        self._first: int | None = None  # the source that set the layout; None: a state or another rank did
        self._known: dict[Layout, Layout] = {}  # layouts as first read, which sets the order of dicts' keys
        self._fitting: Layout | None = None  # the slots' own object that is equal to `layout`

    def note_layouts(self, parts: Sequence[Part | None]) -> None:
        """Note the layouts that parts have for the first time."""
        for part in parts:
            if part is not None:
                for layout in part.contents.layouts:
                    self._known.setdefault(layout, layout)

    def with_first_keys(self, layout: Layout) -> Layout:
        """Return the equal layout whose dicts have their keys in the order in which they were met first."""
        return self._known.get(layout, layout)

    def check(self, parts: Sequence[Part | None], slot: Slot | None) -> None:
        """Check that the streams of a step share the layout of the epoch's first stream; called once per step.

        Raises:
            ItemError: A stream does not; names the first in lane order.
        """
        for part, reader in zip(parts, self._readers, strict=True):
            if part is None:
                continue
            contents = part.contents
            if contents.layouts:
                self.note_layouts([part])
            if contents.in_slot and slot is not None:
                fits = slot.layout is self._fitting
            else:
                fits = len(contents.blocks) == 1 and contents.blocks[0].layout == self.layout
            # Most parts fit as a whole, so their lanes need not be compared one by one.
            for lane, source, position, layout in () if fits else _reads(part, slot, reader.lanes):
                if self.layout is None:
                    self.layout, self._first = self.with_first_keys(layout), source
                if layout != self.layout:
                    raise self._misfit(reader, lane, source, position, layout)
                if contents.in_slot:
                    self._fitting = layout

    def _misfit(self, reader: Reader, lane: int, source: int, position: int, layout: Layout) -> ItemError:
        assert self.layout is not None
        name, worker = self._name(source), reader.worker_id
        first = "" if self._first is None else f" (source {self._first}, {self._name(self._first)})"
        return ItemError(
            f"source {source} ({name}), item {position}, lane {lane}, worker {worker}: the stream "
            f"does not fit beside the epoch's first{first}: {self.layout.difference(layout)}; {ALIKE}; or pass a "
            "collate_fn, which may combine different ones",
            source_index=source,
            source=name,
            position=position,
            lane=lane,
            worker_id=worker,
        )

    def _name(self, source: int) -> str:
        try:
            return shorten(self._sources[source])
        except Exception:  # the misfit must be reported even if the source's name cannot be read
            return "?"


def _reads(part: Part, slot: Slot | None, lanes: range) -> Iterator[tuple[int, int, int, Layout]]:
    contents = part.contents
    layout: Layout | None
    for run in runs_of(contents.runs):
        if contents.in_slot and slot is not None:
            layout = slot.layout
        else:
            layout = next((block.layout for block in contents.blocks if block.counts[run.lane - lanes.start]), None)
        if layout is not None:  # without a layout the reader failed while making the part, which has its own error
            yield run.lane, run.source, run.position, layout
