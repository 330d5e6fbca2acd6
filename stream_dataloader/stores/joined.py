"""Stores that were packed in parts, on several machines, and the factory that reads them.

A folder, or its URL. ::

    0-of-8/ ... 7-of-8/     stores of one format, each with a file that says which part it is
    joined.json             the parts, with their fingerprints; see `memmap/packed`
    streams.bin             `start` is a stream's number in its part; one more row: the part
    keys.bin, notes.bin     keys and metadata of all streams

Guarantee: streams are those of the parts, in the order of the sources. A part that was replaced raises an error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import in_folder, inside
from stream_dataloader.stores._base.formats import FORMATS, JOINED, PART_NAME, check_options
from stream_dataloader.stores._base.store import Store, replaced
from stream_dataloader.stores._base.stream import Steps
from stream_dataloader.stores.memmap.packed import ROWS, StreamTables, check_sizes
from stream_dataloader.streams.cache import is_url

__all__ = ["KIND", "JoinedStore"]

KIND = "joined store"


class JoinedStore(Store):
    """Store that `stores.join` made of parts.

    Args:
        path: Folder of the store, or its URL.
        options: Options of the parts' format, such as `columns`.
    """

    format: ClassVar[str] = "joined"

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(path, **{"files": "inside", **options})  # each format of parts has this option
        self._check_all = True
        self._parts: dict[int, Store] = {}
        check_options(self._kind, options, f"the parts of {self.path} are of the format {self.index.format!r}")
        if self.index.parts:
            self._part(0)  # raises for the values of options

    @property
    def _kind(self) -> Any:
        format = FORMATS[self.index.format]
        return format.load(format.store)

    def _read_index(self) -> _Index:
        if not is_url(self.path) and not os.path.exists(os.path.join(self.path, JOINED)):
            found = sorted(filter(PART_NAME.fullmatch, os.listdir(self.path)))
            raise StoreError(f"{self.path} has the parts {', '.join(found)}; call stores.join, once all are packed")
        return _Index(self.path, check=self._check_all, cache=self._options.get("cache"))

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_parts": {}, "_check_all": False}

    def _part(self, number: int) -> Store:
        if number not in self._parts:
            folder, fingerprint = self.index.parts[number]
            part: Store = self._kind(in_folder(self.path, folder), **self._options)
            if part.index.fingerprint != fingerprint:
                raise replaced(part.path)
            self._parts.setdefault(number, part)
        return self._parts[number]

    def _place(self, number: int) -> tuple[Store, int]:
        table = self.index.table
        return self._part(int(table[ROWS, number])), int(table[0, number])

    def _open_steps(self, number: int) -> Steps:
        part, own = self._place(number)
        return part._open_steps(own)

    def check_stream(self, number: int) -> None:
        part, own = self._place(number)
        part.check_stream(own)

    def _damaged_files(self) -> list[str]:
        damaged = []
        for number in range(len(self.index.parts)):
            try:
                damaged += self._part(number)._damaged_files()
            except (OSError, ValueError) as error:  # of opening it
                damaged.append(str(error))
        return damaged

    def _leaves(self) -> dict[str, str]:
        lengths = self.index.lengths
        return self._place(int(lengths.argmax()))[0]._leaves() if lengths.any() else {}

    def close(self) -> None:
        for part in self._parts.values():
            part.close()
        super().close()


class _Index(StreamTables):
    """Tables of all parts; `parts` are their folders and fingerprints."""

    kind: ClassVar[str] = KIND
    header: ClassVar[str] = JOINED

    def _read_own(self, folder: str, content: Mapping[str, Any]) -> int:
        self.format: str = content["format"]
        if self.format not in FORMATS or FORMATS[self.format].packer is None:
            raise ValueError(f"its parts are of the format {self.format!r}")
        self.parts: list[tuple[str, str]] = [(part["folder"], part["fingerprint"]) for part in content["parts"]]
        self._streams: list[int] = [part["streams"] for part in content["parts"]]
        check_sizes(*self._streams)
        for name, _ in self.parts:
            inside(folder, name, JOINED)
        return 1

    def _streams_lie_inside(self) -> bool:
        places = zip(self.table[0].tolist(), self.table[ROWS].tolist(), strict=True)
        return all(0 <= part < len(self.parts) and number < self._streams[part] for number, part in places)
