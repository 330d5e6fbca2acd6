"""A store: streams that are kept in one place, and the factory that opens them.

Guarantee: a store that was replaced after it was opened is an error, never other data.
"""

from __future__ import annotations

import operator
import os
import platform
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stream_dataloader._items.layout import Layout
from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.files import disk_bytes, plain_path
from stream_dataloader.stores._base.leaves import leaf_names
from stream_dataloader.stores._base.stream import Steps, StoreStream, StreamNumbers
from stream_dataloader.streams._media.section import closed_on_error, section_of
from stream_dataloader.streams.cache import is_url
from stream_dataloader.streams.cache.gate import Gate, check_files

__all__ = ["Index", "OpenedStore", "Store", "StoreInfo", "replaced"]


@dataclass(frozen=True, kw_only=True)
class StoreInfo:
    """What a store holds.

    Attributes:
        path: Where it lies.
        format: The name of its format.
        version: Of the format; empty if it says none.
        streams: How many there are.
        steps: Of all streams together; None if only reading tells.
        leaves: Dtype and shape of leaves, by name: `{"['image']": "uint8 (3, 240, 360)"}`.
        disk_bytes: What the files take; None if they are remote.
        metadata: What the store says of itself.
    """

    path: str
    format: str
    version: str = ""
    streams: int
    steps: int | None
    leaves: Mapping[str, str]
    disk_bytes: int | None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Index:
    """What is known without reading streams.

    Attributes:
        fingerprint: Tells this content from any other.
        lengths: The time steps of each stream, `(streams,)`.
    """

    fingerprint: str
    lengths: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lengths)


class OpenedStore(NamedTuple):
    """What `stores.open` returns: the first two arguments of `StreamDataset`.

    Attributes:
        sources: The numbers of the store's streams.
        open_stream: The store: a factory.
    """

    sources: StreamNumbers
    open_stream: Store


class Store(ABC):
    """A store's streams: a factory for `StreamDataset` that knows what there is.

    A source is the number of a stream, or a section of it: `(number, start, stop)`, in time steps.

    A subclass gives the path and its options, as plain values, to `super().__init__`.

    Args:
        path: Where the store lies.
        options: What a process needs to open it again.

    Raises:
        FileNotFoundError: There is nothing at that path.
        StoreError: The store is damaged, not of this format, or lacks what an option names.
        TypeError, ValueError: An option is none.
        ImportError: A package is missing; names the extra to install.
    """

    format: ClassVar[str]
    _yields_steps: ClassVar[bool] = True
    open_early: ClassVar[bool] = True
    _opened: Any = None  # the files that streams share: `Handles`

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        self.path = plain_path(path)
        self._options = options
        check_files(options.get("files", "inside"))
        self._expected: str | None = None
        self._seen: tuple[str, str] | None = None
        self._lock = threading.Lock()
        self._index: Any = None
        self._numbers: dict[str, int] = {}

    @abstractmethod
    def _read_index(self) -> Any:
        """An `Index`, or what has its attributes; lengths may be None.

        `key(number)`, `note(number)`, `version` and `metadata` are what it says, if it has them.
        """

    @abstractmethod
    def _open_steps(self, number: int) -> Steps:
        """Open one stream; `number` is one there is."""

    def _state(self) -> str:
        """Times of files, where the index does not tell all."""
        return ""

    def _check_state(self) -> None:
        """Raise if the store was replaced since its index was read."""
        if self._seen is not None and self._state() != self._seen[1]:
            raise replaced(self.path)

    def _check_links(self) -> None:
        """Raise if a link in the store's folder leads out of it; formats of other packages have no such option."""
        if "files" in self._options and os.path.isdir(self.path):
            Gate(self.path, self._options["files"]).check_links()

    @property
    def index(self) -> Any:
        """What `_read_index` returned.

        Raises:
            StoreError: It cannot be read, or is another than it was.
        """
        if self._index is None:
            with self._lock:
                if self._index is None:
                    seen = (platform.node(), self._state())
                    self._check_links()
                    index = self._read_index()
                    if self._expected is not None and index.fingerprint != self._expected:
                        raise replaced(self.path)
                    if self._seen is not None and self._seen[0] == seen[0] and self._seen != seen:
                        raise replaced(self.path)
                    self._seen, self._expected, self._index = seen, index.fingerprint, index
        return self._index

    def __getstate__(self) -> dict[str, Any]:
        _ = self.index
        return self.__dict__ | {"_index": None, "_lock": None, "_numbers": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close what is open for the index, and files when no stream reads them."""
        self._index = None
        if self._opened is not None:
            self._opened.close()

    def __len__(self) -> int:
        return len(self.index)

    @property
    def sources(self) -> StreamNumbers:
        """The numbers of all streams, for `StreamDataset`."""
        return StreamNumbers(len(self), self.index.fingerprint)

    @property
    def lengths(self) -> NDArray[np.int64] | None:
        """Time steps of each stream, `(streams,)`; None if only reading tells."""
        lengths: NDArray[np.int64] | None = self.index.lengths
        return lengths

    def lengths_of(self, sources: Any) -> NDArray[np.int64] | None:
        """See `protocols.KnowsLengths`."""
        whole = isinstance(sources, StreamNumbers) and sources.fingerprint == self.index.fingerprint
        return self.lengths if whole else None

    def key(self, number: int) -> str:
        """A stream's name in the store's format."""
        return str(getattr(self.index, "key", str)(self._check_number(number)))

    def number(self, key: str) -> int:
        """Which stream has a key.

        Raises:
            KeyError: None has.
        """
        if not self._numbers:
            self._numbers = {self.key(number): number for number in range(len(self))}
        if key not in self._numbers:
            raise KeyError(f"{self.path} has no stream {key!r}; it has {shorten(list(self._numbers), 120)}")
        return self._numbers[key]

    def metadata(self, number: int) -> Mapping[str, Any]:
        """What the store says of one stream."""
        number = self._check_number(number)
        return dict(self.index.note(number)) if hasattr(self.index, "note") else {}

    def name_of(self, number: int) -> str:
        """How errors call a stream: the store, its number and its key."""
        key = self.key(number)
        return f"{self.path}, stream {number}" + (f" ({key})" if key != str(number) else "")

    def length(self, source: Any) -> int | None:
        """How many time steps a source has; None if only reading tells.

        Raises:
            ValueError: There is no such source.
        """
        number, start, stop = self._section(source)
        if self.lengths is None:
            return None
        return self._steps_within(number, int(self.lengths[number]), start, stop)[1] - start

    def __call__(self, source: Any, *, start: int = 0) -> StoreStream:
        """Open one stream, or a section of it, at its time step `start`.

        Raises:
            ValueError: There is no such source, or it has fewer steps.
            StoreError: The store is damaged.
        """
        number, first, stop = self._section(source)
        steps = self._open_steps(number)
        with closed_on_error(steps):
            first, stop = self._steps_within(number, len(steps), first, stop)
            start = operator.index(start)
            if not 0 <= start <= stop - first:
                raise ValueError(f"start is {start}, and {self.name_of(number)} has {stop - first} to read")
            return self._stream_of(steps, first, start, stop)

    def _stream_of(self, steps: Steps, first: int, start: int, stop: int) -> StoreStream:
        return StoreStream(steps, first, start, stop)

    def info(self) -> StoreInfo:
        """What the store holds."""
        lengths = self.lengths
        return StoreInfo(
            path=self.path,
            format=self.format,
            version=self._version(),
            streams=len(self),
            steps=None if lengths is None else int(lengths.sum()),
            leaves=self._leaves(),
            disk_bytes=self._disk_bytes(),
            metadata=self._metadata(),
        )

    def _version(self) -> str:
        return str(getattr(self.index, "version", ""))

    def _metadata(self) -> Mapping[str, Any]:
        return dict(getattr(self.index, "metadata", {}))

    def _leaves(self) -> dict[str, str]:
        """Dtype and shape of each leaf; here of the first step."""
        if (item := self._first_item()) is None:
            return {}
        layout, _ = Layout.of(item, windowed=False)
        return dict(zip(leaf_names(layout.structure), map(str, layout.specs), strict=True))

    def _first_item(self) -> Any:
        for number in range(len(self)):
            with closing(self(number)) as stream:
                for item in stream:
                    return item
        return None

    def _with_columns(self, names: list[str]) -> Store:
        return type(self)(self.path, **self._options | {"columns": names})

    def _disk_bytes(self) -> int | None:
        return None if is_url(self.path) else disk_bytes(self.path)

    def verify(self, progress: Callable[[int, int], Any] | None = None) -> list[str]:
        """Read everything, and compare it with its checksums.

        Args:
            progress: Called with how many streams were read, and of how many.

        Returns:
            What is wrong, a line each; empty if nothing is.
        """
        problems: dict[str, None] = {}  # each once: streams may lie in one file
        for number in range(len(self)):
            try:
                self.check_stream(number)
            except (OSError, ValueError) as error:
                problems[str(error)] = None
            if progress is not None:
                progress(number + 1, len(self))
        return list(problems)

    def check_stream(self, number: int) -> None:
        """Read one stream, and compare it with its checksum.

        Raises:
            StoreError: It is damaged.
            OSError: It cannot be read.
        """
        with closing(self(number)) as stream:
            steps, lengths = sum(1 for _ in stream), self.lengths
            if lengths is not None and steps != lengths[number]:
                raise StoreError(f"{self.name_of(number)} has {steps} steps of {lengths[number]}")

    def _section(self, source: Any) -> tuple[int, int, int | None]:
        number, start, stop = section_of(tuple(source) if isinstance(source, list) else source)
        for name, value in (("start", start), ("stop", stop)):
            if isinstance(value, float):
                raise TypeError(f"{name} is {value}; steps of a store are counted, give an int")
        return self._check_number(number), start, stop

    def _steps_within(self, number: int, length: int, start: int, stop: int | None) -> tuple[int, int]:
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise ValueError(f"{self.name_of(number)} has {length} steps, not {start} to {stop}")
        return start, stop

    def _check_number(self, number: Any) -> int:
        try:
            found = operator.index(number)
        except TypeError:
            raise TypeError(f"{self.path} has no stream {shorten(number)}; give its number, number(key)") from None
        if not 0 <= found < len(self):
            raise ValueError(f"{self.path} has no stream {found} of {len(self)}")
        return found

    def __repr__(self) -> str:
        given = {name: value for name, value in self._options.items() if value is not None}
        return f"{type(self).__name__}({self.path!r}, **{shorten(given)})"


def replaced(path: str) -> StoreError:
    """The error for a store that is not what it was."""
    return StoreError(f"{path} was replaced or written to since it was opened; open it again")
