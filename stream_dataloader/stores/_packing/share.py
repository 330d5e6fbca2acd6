"""One part of a store that several machines pack: its share of the sources, and the note that says which part it is.

Part `i` of `n` is a store of its own, in the folder `i-of-n` of the whole. It also has ::

    part.json     number of the part and of all, and with what it was packed

Guarantee: a note is written before the part's index, so every finished part has one.
"""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.files import damage_named, in_folder, read_json, write_synced
from stream_dataloader.stores._base.formats import FORMATS
from stream_dataloader.stores._base.store import Store
from stream_dataloader.streams.cache import FileCache, is_url

__all__ = ["NOTE", "Note", "Share"]

NOTE = "part.json"

_KIND, _VERSION = "stream_dataloader part of a store", 1


class Share(NamedTuple):
    """Part `number` of `parts`."""

    number: int
    parts: int

    @classmethod
    def checked(cls, part: Any) -> Share:
        try:
            number, parts = map(operator.index, part)
        except (TypeError, ValueError):
            raise TypeError(f"part is {shorten(part)}; give (i, n), to pack part i of n") from None
        if not 0 <= number < parts:
            raise ValueError(f"part is {(number, parts)}; parts are numbered from 0: give (i, n), with 0 <= i < n")
        return cls(number, parts)

    @property
    def folder(self) -> str:
        return f"{self.number}-of-{self.parts}"

    def sources(self, total: int) -> range:
        """Return the numbers of the part's sources: neighbours, so that joined parts keep the order."""
        return range(total * self.number // self.parts, total * (self.number + 1) // self.parts)


class Note(NamedTuple):
    """Content of part.json: which part it is, the arguments of `pack`, and the metadata of the whole store.

    Arguments whose names begin with an underscore may differ.
    """

    share: Share
    arguments: Mapping[str, Any]
    metadata: Mapping[str, Any]

    @classmethod
    def of(cls, folder: str, cache: FileCache) -> Note:
        """Read the note of a finished part.

        Raises:
            FileNotFoundError: There is no such part.
            StoreError: The note is damaged.
        """
        path = in_folder(folder, NOTE)
        with cache.open(path) as local:
            content = read_json(local.path, dict, path)
        with damage_named(path):
            if (content["kind"], content["version"]) != (_KIND, _VERSION):
                raise ValueError(f"it is of {content['kind']!r}, version {content['version']!r}")
            return cls(Share.checked(content["part"]), dict(content["arguments"]), dict(content["metadata"]))

    def open_part(self, folder: str, cache: FileCache) -> Store:
        """Open the part in a folder, or at its URL."""
        format = FORMATS[self.arguments["format"]]
        part: Store = format.load(format.store)(folder, **({"cache": cache} if is_url(folder) else {}))
        return part

    def write(self, folder: str) -> None:
        content = {
            "kind": _KIND,
            "version": _VERSION,
            "part": self.share,
            "arguments": self.arguments,
            "metadata": self.metadata,
        }
        write_synced(os.path.join(folder, NOTE), json.dumps(content).encode())

    def check(self, arguments: Mapping[str, Any], where: str, remedy: str) -> None:
        """Raise unless the part was packed with these arguments."""
        names = [name for name in {**arguments, **self.arguments} if not name.startswith("_")]
        changed = [name for name in names if self.arguments.get(name) != arguments.get(name)]
        if changed:
            what = "; ".join(f"{name} was {self.arguments.get(name)}, not {arguments.get(name)}" for name in changed)
            raise StoreError(f"{where} was packed with other arguments: {what}; {remedy}")
