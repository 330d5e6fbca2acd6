"""Base class of stores: streams in one place, and the factory that opens them.

Guarantee: a store that was replaced after it was opened raises an error, and never delivers other data.
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

from stream_dataloader._engine.items.layout import Layout
from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.files import disk_bytes, plain_path
from stream_dataloader.stores._base.leaves import leaf_names
from stream_dataloader.stores._base.stream import Steps, StoreStream, StreamNumbers
from stream_dataloader.streams._media.section import section_of
from stream_dataloader.streams.cache import is_url
from stream_dataloader.streams.cache.gate import Gate, check_files

__all__ = ["Index", "OpenedStore", "Store", "StoreInfo", "replaced"]


@dataclass(frozen=True, kw_only=True)
class StoreInfo:
    """Summary of a store's contents.

    Attributes:
        path: Path of the store.
        format: Name of its format.
        version: Version of the format; empty if the store has none.
        streams: Number of streams.
        steps: Number of time steps of all streams together; None if only reading would tell.
        leaves: Dtype and shape of leaves, by name: `{"['image']": "uint8 (3, 240, 360)"}`.
        disk_bytes: Size of the files; None if they are remote.
        metadata: Metadata of the whole store.
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
    """Facts about a store that are known without reading streams.

    Attributes:
        fingerprint: Text that identifies this content.
        lengths: Number of time steps of each stream, `(streams,)`.
    """

    fingerprint: str
    lengths: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lengths)


class OpenedStore(NamedTuple):
    """Result of `stores.open`: the first two arguments of `StreamDataset`.

    Attributes:
        sources: Numbers of the store's streams.
        open_stream: The store, which is a factory.
    """

    sources: StreamNumbers
    open_stream: Store


class _ItemStream(NamedTuple):
    """The stream that `Store.item` keeps open, with its source and process."""

    stream: StoreStream
    place: tuple[int, int, int | None]
    process: int


class Store(ABC):
    """Streams of a store: a factory for `StreamDataset` that knows its streams.

    A source is the number of a stream, or a section of it: `(number, start, stop)`, in time steps.

    A subclass passes the path and its options, as plain values, to `super().__init__`.

    Args:
        path: Path of the store.
        options: Options with which a process opens the store again.

    Raises:
        FileNotFoundError: Nothing exists at that path.
        StoreError: The store is damaged, has another format, or lacks something that an option names.
        TypeError, ValueError: An option has an invalid value.
        ImportError: A package is missing; the message names the extra to install.
    """

    format: ClassVar[str]
    _yields_steps: ClassVar[bool] = True
    open_early: ClassVar[bool] = True
    _opened: Any = None  # `Handles`: the open files that streams share

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        self.path = plain_path(path)
        self._options = options
        check_files(options.get("files", "inside"))
        self._expected: str | None = None
        self._seen: tuple[str, str] | None = None
        self._lock = threading.Lock()
        self._index: Any = None
        self._numbers: dict[str, int] = {}
        self._forget_item()

    @abstractmethod
    def _read_index(self) -> Any:
        """Read the index: an `Index`, or an object with its attributes. Its lengths may be None.

        It may also have `key(number)`, `note(number)`, `version` and `metadata`.
        """

    @abstractmethod
    def _open_steps(self, number: int) -> Steps:
        """Open one stream; `number` is valid."""

    def _state(self) -> str:
        """Return a text that changes with the store's files, for changes that the index does not show."""
        return ""

    def _check_state(self) -> None:
        """Raise if the store was replaced since its index was read."""
        if self._seen is not None and self._state() != self._seen[1]:
            raise replaced(self.path)

    def _check_links(self) -> None:
        """Raise if a link in the store's folder leads out of it, unless the format has no option `files`."""
        if "files" in self._options and os.path.isdir(self.path):
            Gate(self.path, self._options["files"]).check_links()

    @property
    def index(self) -> Any:
        """The index from `_read_index`, read on first use.

        Raises:
            StoreError: The index cannot be read, or has changed.
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
        return self.__dict__ | {"_index": None, "_lock": None, "_numbers": {}, "_item": None, "_item_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()
        self._forget_item()

    def _forget_item(self) -> None:
        """Have no stream open for `item`."""
        self._item: _ItemStream | None = None
        self._item_lock = threading.Lock()

    def close(self) -> None:
        """Close the files of the index and of `item` now, and other files once no stream reads them."""
        self._index = None
        with self._item_lock:
            self._close_item()
        if self._opened is not None:
            self._opened.close()

    def __len__(self) -> int:
        return len(self.index)

    @property
    def sources(self) -> StreamNumbers:
        """Numbers of all streams, for `StreamDataset`."""
        return StreamNumbers(len(self), self.index.fingerprint)

    @property
    def lengths(self) -> NDArray[np.int64] | None:
        """Number of time steps of each stream, `(streams,)`; None if only reading would tell."""
        lengths: NDArray[np.int64] | None = self.index.lengths
        return lengths

    def lengths_of(self, sources: Any) -> NDArray[np.int64] | None:
        """Return the lengths of sources; see `protocols.KnowsLengths`."""
        whole = isinstance(sources, StreamNumbers) and sources.fingerprint == self.index.fingerprint
        return self.lengths if whole else None

    def key(self, number: int) -> str:
        """Return a stream's name in the store's format."""
        return str(getattr(self.index, "key", str)(self._check_number(number)))

    def number(self, key: str) -> int:
        """Return the number of the stream with a key.

        Raises:
            KeyError: No stream has this key.
        """
        if not self._numbers:
            self._numbers = {self.key(number): number for number in range(len(self))}
        if key not in self._numbers:
            raise KeyError(f"{self.path} has no stream {key!r}; it has {shorten(list(self._numbers), 120)}")
        return self._numbers[key]

    def metadata(self, number: int) -> Mapping[str, Any]:
        """Return the metadata of one stream."""
        number = self._check_number(number)
        return dict(self.index.note(number)) if hasattr(self.index, "note") else {}

    def name_of(self, number: int) -> str:
        """Return a stream's name for errors: the store, its number and its key."""
        key = self.key(number)
        return f"{self.path}, stream {number}" + (f" ({key})" if key != str(number) else "")

    def length(self, source: Any) -> int | None:
        """Return the number of time steps of a source, or None if only reading would tell.

        Raises:
            ValueError: The store has no such source.
        """
        number, start, stop = self._section(source)
        if self.lengths is None:
            return None
        return self._steps_within(number, int(self.lengths[number]), start, stop)[1] - start

    def __call__(self, source: Any, *, start: int = 0) -> StoreStream:
        """Open one stream, or a section of it, at its time step `start`.

        Raises:
            ValueError: The store has no such source, or it has fewer steps.
            StoreError: The store is damaged.
        """
        number, first, stop = self._section(source)
        steps = self._open_steps(number)
        try:
            first, stop = self._steps_within(number, len(steps), first, stop)
            start = operator.index(start)
            if not 0 <= start <= stop - first:
                raise ValueError(f"start is {start}, and {self.name_of(number)} has {stop - first} to read")
            return self._stream_of(steps, first, start, stop)
        except BaseException:
            steps.close()
            raise

    def item(self, source: Any, position: int) -> Any:
        """Return one item of a stream, as `(batch.source_index, batch.position)` say where it is.

        The stream stays open for the next call, until another source is asked for or the store is closed. So places
        near each other are cheap. Any thread may call it.

        Args:
            source: A stream's number, or a section `(number, start, stop)`.
            position: The item, counted from the first of the source.

        Raises:
            IndexError: The source has no such item.
            ValueError: There is no such source.
            StoreError: The store is damaged, or has no random access.
        """
        place, position = self._section(source), operator.index(position)
        with self._item_lock:
            kept = self._item
            if kept is None or kept.place != place or kept.process != os.getpid():
                self._close_item()
                self._item = kept = _ItemStream(self(source), place, os.getpid())
            steps = kept.stream.steps
            if not 0 <= position < steps:
                there = f"{steps} steps, 0 to {steps - 1}" if steps else "no steps"
                padding = "; -1 in batch.position is padding" if position == -1 else ""
                raise IndexError(f"position is {position}, and {self._named(place)} has {there}{padding}")
            try:
                return kept.stream.item(position)
            except BaseException:  # the next call opens it again
                self._close_item()
                raise

    def _close_item(self) -> None:
        kept, self._item = self._item, None
        if kept is not None and kept.process == os.getpid():  # a stream that was inherited by fork is its parent's
            kept.stream.close()

    def _named(self, place: tuple[int, int, int | None]) -> str:
        number, start, stop = place
        section = "" if (start, stop) == (0, None) else f", section {start} to {'its end' if stop is None else stop}"
        return self.name_of(number) + section

    def _stream_of(self, steps: Steps, first: int, start: int, stop: int) -> StoreStream:
        return StoreStream(steps, first, start, stop)

    def info(self) -> StoreInfo:
        """Return a summary of the store's contents."""
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
        """Return dtype and shape of each leaf; by default those of the first step."""
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
            progress: Function that is called with the number of streams read so far and the number of all.

        Returns:
            One line for each problem; empty if there is none.
        """
        damaged = self._damaged_files()
        problems: dict[str, None] = {}  # without repetitions, because several streams may share a file
        for number in range(len(self)):
            try:
                self.check_stream(number)
            except (OSError, ValueError) as error:
                problems[str(error)] = None
            if progress is not None:
                progress(number + 1, len(self))
        return damaged + [one for one in problems if not any(text in one for text in damaged)]

    def _damaged_files(self) -> list[str]:
        """Return a line for each file that differs from a checksum over all of it, whose streams have none."""
        return []

    def check_stream(self, number: int) -> None:
        """Read one stream, and compare it with its checksum.

        Raises:
            StoreError: The stream is damaged.
            OSError: The stream cannot be read.
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
    """Return the error for a store that has changed."""
    return StoreError(f"{path} was replaced or written to since it was opened; open it again")
