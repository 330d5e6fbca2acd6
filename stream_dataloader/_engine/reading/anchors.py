"""Streams that are read at some items only: the anchors of `StreamDataset(..., anchors=)`.

Guarantee: the stream that a lane reads consists of the anchors alone, so positions, resumed states and windows count
anchors. The user's stream is asked to go to the next one if it has `seek_item`; otherwise it is read up to there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from stream_dataloader._engine.reading.opening import END, Handle, seeks_items
from stream_dataloader._engine.schedule.sections import Cuts, Section
from stream_dataloader.errors import ItemError, LengthError
from stream_dataloader.protocols import NOTHING_YET
from stream_dataloader.stream_info import StreamInfo, get_stream_info


class OpenAnchors:
    """Opens the streams of anchors, given the function that opens those of all items."""

    def __init__(self, open_stream: Callable[..., Any], cuts: Cuts) -> None:
        self._open_stream, self._cuts = open_stream, cuts

    def __call__(self, source: Any, start: int = 0) -> Iterator[Any]:
        """Return the anchors of a source, from number `start` on."""
        info = get_stream_info()
        assert info is not None
        items = self._cuts.items(info.source_index, info.epoch)[start:].tolist()
        open_items = getattr(self._open_stream, "_open_items", None)  # as that of map-style datasets
        return open_items(source, items) if open_items else _Anchors(info, self._open_stream, source).read(items)


class _Anchors(Handle):
    """The user's stream."""

    def __init__(self, info: StreamInfo, factory: Callable[..., Any], source: Any) -> None:
        super().__init__(info, factory, source, Section(info.source_index, 0, -1, -1))

    def read(self, items: Sequence[int]) -> Iterator[Any]:
        """Open it at the first of some items, and yield them."""
        try:
            self.items = items[0] if items else 0
            iterator: Any = self._begin() if items else None
            if self.marks:
                what = "the stream says where sequences start (starts_within), and anchors= reads only some items"
                raise self.error(ItemError, f"{what}; pass a source for each sequence, or leave anchors= out")
            for item in items:
                if item > self.items and seeks_items(iterator):
                    iterator.seek_item(item)
                    self.items = item
                while self.items <= item:
                    if (found := next(iterator, END)) is END:
                        what = f"the stream has only {self.items} items, and item {item} is an anchor"
                        raise self.error(LengthError, f"{what}; correct lengths=")
                    if found is NOTHING_YET:
                        yield found
                    else:
                        self.items += 1
                yield found
        finally:
            self.close()
