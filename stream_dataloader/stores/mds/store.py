"""Reads MDS datasets, of this package and of others, from a folder or from a server.

Source: mosaicml-streaming 0.13, whose `MDSWriter` and `StreamingDataset` the tests compare with.

Guarantee: what is read is what the index says was written: a shard that was fetched or unpacked has the right hashes.
Opening a dataset costs its index and, where streams have to be found first, one pass over one column, made once.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from stream_dataloader._items.structure import Node, flatten, leaf_paths
from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.files import inside, stamp_of
from stream_dataloader.stores._base.store import Store
from stream_dataloader.stores._base.structure import classes_of, from_json
from stream_dataloader.stores.mds.encodings import ArrayEncoding, Encoding, ListEncoding
from stream_dataloader.stores.mds.fetch import Shards
from stream_dataloader.stores.mds.index import INDEX, DatasetIndex, in_folder, read_index
from stream_dataloader.stores.mds.kinds import encoding_of
from stream_dataloader.stores.mds.scan import write_key_table, write_length_table
from stream_dataloader.stores.mds.shards import Columns
from stream_dataloader.stores.mds.steps import ItemColumns, RowSteps, SampleSteps
from stream_dataloader.stores.mds.table import StreamTable
from stream_dataloader.streams._media.section import whole_number
from stream_dataloader.streams.cache.file_cache import FileCache, is_url

__all__ = ["MdsStore"]

_COLUMN = "column:"


class MdsStore(Store):
    """An MDS dataset, in a folder or at a URL.

    Items are dicts, with a leaf for each column; of a packed store they are what was packed. Numbers, text and JSON are
    what they were; `jpeg`, `png` and `pil` are arrays `(H, W)`, `(H, W, 3)` RGB or `(H, W, 4)`. Those of `jpeg`
    may differ from another decoder's by a few shades.

    Args:
        path: The folder of index.json, or its URL, of any protocol that fsspec knows.
        stream: What a stream is: `"shard"`, all samples of a shard; `"sample"`, one sample, of which arrays' rows and
            lists' elements are the time steps, and all else is the same in each; or the name of a column: the
            samples that follow each other with one value in it. (`"column:shard"` is a column of that name.) None: what
            was packed as one, of other datasets a shard. Streams of a column are found by one pass over it, which
            fetches the whole dataset if it is remote; what it found is kept in the cache.
        split: The folder below `path` that has the index.json.
        columns: Which to read; None reads all but the one that names streams.
        allow_pickle: Also read columns of encoding `pkl`. Unpickling runs whatever code they hold.
        cache: Where remote shards and unpacked ones are kept; None is what the environment says, see `FileCache`.
        predownload: How many more shards of a stream that is read are fetched and unpacked ahead of use.

    Raises:
        FileNotFoundError: There is no such folder, or no index.json at the URL.
        StoreError: The dataset is damaged, or has no such column, or one that is not read.
        ImportError: A package is missing that fetches it; names the extra.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> from stream_dataloader.stores import MdsStore, MdsWriter
        >>> folder = tempfile.mkdtemp()
        >>> with MdsWriter(folder, columns={"x": "ndarray:float32:2", "episode": "int"}) as writer:
        ...     for step in range(5):
        ...         writer.write({"x": np.full(2, step, np.float32), "episode": step // 3})
        >>> store = MdsStore(folder, stream="episode")
        >>> [(store.key(number), [item["x"].tolist() for item in store(number)]) for number in store.sources]
        [('0', [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]), ('1', [[3.0, 3.0], [4.0, 4.0]])]
    """

    format: ClassVar[str] = "mds"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        stream: str | None = None,
        split: str | None = None,
        columns: Sequence[str] | None = None,
        allow_pickle: bool = False,
        cache: FileCache | None = None,
        predownload: int = 1,
    ) -> None:
        names = None if columns is None else list(columns)
        ahead = whole_number("predownload", predownload, "give a number of shards from 0 on", 0)
        super().__init__(
            path,
            stream=stream,
            split=split,
            columns=names,
            allow_pickle=allow_pickle,
            cache=cache,
            predownload=ahead,
        )
        if stream is not None and not isinstance(stream, str):
            raise TypeError(f"stream is {stream!r}; give 'shard', 'sample' or the name of a column")
        if isinstance(columns, str):
            raise TypeError(f"columns is {columns!r}; give a list of names")
        self._wanted = names
        self._ahead = ahead
        self._cache = FileCache() if cache is None else cache
        if split is not None and split != "":
            inside(self.path, split, "split")
        self._folder = in_folder(self.path, split) if split else self.path
        self._classes: dict[str, type] = {}
        self._checked: set[int] = set()
        self._classes = classes_of(self.index.structure)

    def _state(self) -> str:
        return "" if is_url(self._folder) else stamp_of([in_folder(self._folder, INDEX)])

    def _read_index(self) -> _MdsIndex:
        path = in_folder(self._folder, INDEX)
        if not is_url(path) and not os.path.isdir(self._folder):
            raise FileNotFoundError(f"there is no MDS dataset at {self._folder}; give the folder of its index.json")
        stamp = self._state()
        with self._cache.open(path) as local:
            found = read_index(local.path, path, self._folder)
            copy = os.path.basename(local.path) if is_url(path) else ""
        return _MdsIndex(self, found, copy, stamp)

    def _open_steps(self, number: int) -> SampleSteps | RowSteps:
        index: _MdsIndex = self.index
        name = functools.partial(self.name_of, number)
        if index.kind == "sample":
            shard = int(np.searchsorted(index.firsts, number, "right")) - 1
            try:
                return RowSteps(index.shards.open(shard), number - int(index.firsts[shard]), index.columns, name)
            except StoreError as error:
                raise StoreError(f"{name()}: {error}") from error
        start, steps = index.extent(number)
        return SampleSteps(index.shards, index.firsts, start, steps, index.columns, self._ahead, name)

    def key(self, number: int) -> str:
        index: _MdsIndex = self.index
        return index.key(self._check_number(number))

    def metadata(self, number: int) -> Mapping[str, Any]:
        table: StreamTable | None = self.index.table
        self._check_number(number)
        return {} if table is None else table.note(number)

    def _version(self) -> str:
        return "2"

    def _metadata(self) -> Mapping[str, Any]:
        found: DatasetIndex = self.index.found
        return {
            **found.note.get("metadata", {}),
            "stream": self.index.kind,
            "columns": dict(zip(found.names, found.encodings, strict=True)),
            "shards": len(found.shards),
            "samples": int(self.index.firsts[-1]),
            "compression": found.shards[0].compression if found.shards else None,
        }

    def _disk_bytes(self) -> int | None:
        if is_url(self._folder):
            return None
        with os.scandir(self._folder) as files:
            return sum(file.stat().st_size for file in files if file.is_file())

    def _problems(self, progress: Callable[[int, int], Any] | None) -> Iterator[str]:
        self._checked = set()
        yield from super()._problems(progress)
        for shard in range(len(self.index.found.shards)):
            try:
                self._verify(shard)
            except (OSError, ValueError) as error:
                yield str(error)

    def check_stream(self, number: int) -> None:
        """Compare the shards of a stream with their hashes, each once a `verify`, and read the stream."""
        index: _MdsIndex = self.index
        start, steps = (number, 1) if index.kind == "sample" else index.extent(number)
        if steps:
            first, last = np.searchsorted(index.firsts, [start, start + steps - 1], "right") - 1
            for shard in range(int(first), int(last) + 1):
                self._verify(shard)
        super().check_stream(number)

    def _verify(self, shard: int) -> None:
        if shard not in self._checked:
            self.index.shards.verify(shard)
            self._checked.add(shard)


class _MdsIndex:
    """What is in a dataset, and what its streams are.

    Attributes:
        found: index.json.
        kind: What a stream is: "packed", "shard", "sample" or "column:" and a name.
        structure: Of an item.
        columns: That items are made of.
        firsts: The first sample of each shard, and behind them the number of all samples.
        shards: All of them.
        table: Which samples are which stream; None where that is plain.
        lengths: See `Index`.
        fingerprint: See `Index`.
    """

    def __init__(self, store: MdsStore, found: DatasetIndex, copy: str, stamp: str) -> None:
        self.found = found
        options, self._name = store._options, in_folder(store._folder, INDEX)
        self.kind = self._kind(options["stream"])
        self.structure, names = self._items(store._wanted, store._classes)
        self._allow_pickle = options["allow_pickle"]
        encodings = {found.names.index(name): self._encoding(name) for name in names}
        places = [found.names.index(name) for name in names]
        self.columns = ItemColumns(self.structure, names, places, [encodings[place] for place in places])
        self.firsts: NDArray[np.int64] = np.cumsum([0, *(shard.samples for shard in found.shards)])
        hashed = all(shard.raw.hashes for shard in found.shards)
        version = hashlib.sha256(f"{found.digest} {'' if hashed else copy}".encode()).hexdigest()[:16]
        columns = Columns(found.names, found.sizes, encodings)
        self.shards = Shards(store._folder, found, version, columns, store._cache, stamp)
        self.table, self.lengths = self._streams(store, version, encodings)
        self._count = len(found.shards) if self.table is None else len(self.table.starts)
        if self.kind == "sample":
            self._count = int(self.firsts[-1])
        self.fingerprint = hashlib.blake2b(f"{found.digest} {self.kind}".encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return self._count

    def _kind(self, asked: str | None) -> str:
        if asked is None:
            return "packed" if "table" in self.found.note else "shard"
        if asked in ("shard", "sample"):
            return asked
        name = asked.removeprefix(_COLUMN)
        self._check_column(name)
        return _COLUMN + name

    def _check_column(self, name: str) -> None:
        if name not in self.found.names:
            raise StoreError(f"{self._name} has no column {shorten(name)}; it has {list(self.found.names)}")

    def _items(self, wanted: list[str] | None, classes: dict[str, type]) -> tuple[Node, list[str]]:
        """The structure of an item, and the columns that are its leaves."""
        found = self.found
        for name in wanted or ():
            self._check_column(name)
        if wanted is not None and (not wanted or len(set(wanted)) < len(wanted)):
            raise StoreError(f"columns is {wanted}; name one or more of {list(found.names)}, each once")
        if wanted is None and (packed := found.note.get("items")) is not None:
            try:
                structure, names = (
                    from_json(packed["structure"], self._name, classes),
                    list(map(str, packed["columns"])),
                )
                if len(leaf_paths(structure)) != len(names) or not set(names) <= set(found.names):
                    raise ValueError(f"leaves {names}")
            except (KeyError, TypeError, ValueError) as error:
                raise StoreError(f"{self._name} does not say what items are ({error}); pack the store anew") from error
            return structure, names
        hidden = (found.note.get("key"), self.kind.removeprefix(_COLUMN) if self.kind.startswith(_COLUMN) else None)
        names = wanted or [name for name in found.names if name not in hidden] or list(found.names)
        structure, names = flatten({name: name for name in names})
        return structure, names

    def _encoding(self, name: str) -> Encoding:
        """How a column is encoded."""
        place = self.found.names.index(name)
        try:
            encoding = encoding_of(self.found.encodings[place], allow_pickle=self._allow_pickle)
        except ValueError as error:
            raise StoreError(f"{self._name}, column {name!r}: {error}; or leave it out, by columns=[...]") from None
        if (encoding.size or None) != (self.found.sizes[place] or None):
            raise StoreError(
                f"{self._name}, column {name!r}: its values have {self.found.sizes[place]} bytes, and "
                f"{self.found.encodings[place]!r} has {encoding.size}; write the dataset anew"
            )
        if name in self.found.note.get("bools", ()) and isinstance(encoding, ArrayEncoding):
            encoding.as_bool()
        return encoding

    def _streams(
        self, store: MdsStore, version: str, encodings: dict[int, Encoding]
    ) -> tuple[StreamTable | None, NDArray[np.int64] | None]:
        """The table of streams, and their lengths; None where there is none."""
        total = int(self.firsts[-1])
        if self.kind == "shard":
            return None, np.diff(self.firsts)
        if self.kind == "packed":
            return self._packed_table(store, total)
        count = len(self.found.shards)
        if self.kind == "sample":
            place = next(
                (
                    place
                    for place, one in zip(self.columns.places, self.columns.encodings, strict=True)
                    if _is_rows(one)
                ),
                None,
            )
            if place is None:
                raise StoreError(
                    f"{self._name}: no column of {self.columns.names} is an array or a list, for time steps"
                )
            encoding = encodings[place]
            if isinstance(encoding, ArrayEncoding) and encoding.shape:
                return None, np.full(total, encoding.shape[0], np.int64)
            if is_url(store._folder):
                return None, None  # to know them, all of it would have to be fetched
            make = functools.partial(
                write_length_table, shards=self.shards, count=count, place=place, encoding=encoding
            )
            table = self._made_table(store, version, make, None)
            return table, table.steps
        name = self.kind.removeprefix(_COLUMN)
        place = self.found.names.index(name)
        key = encodings.setdefault(place, self._encoding(name))  # the shards' columns have it, too
        if not _is_key(key, self.found.encodings[place]):
            raise StoreError(
                f"{self._name}: the column {name!r} is {self.found.encodings[place]!r}, and streams are named by text "
                "or whole numbers"
            )
        scan = functools.partial(write_key_table, shards=self.shards, count=count, place=place, encoding=key)
        table = self._made_table(store, version, scan, total)
        return table, table.steps

    def _packed_table(self, store: MdsStore, total: int) -> tuple[StreamTable, NDArray[np.int64]]:
        note = self.found.note["table"]
        try:
            basename, check = note["basename"], int(note["check"])
        except (KeyError, TypeError, ValueError):
            raise StoreError(f"{self._name} does not say where its streams are; pack the store anew") from None
        inside(store._folder, basename, self._name)
        with store._cache.open(in_folder(store._folder, basename)) as local:
            table = StreamTable(local.path, total)
        if table.check != check:
            raise StoreError(f"{local.path} is damaged, or of another store: its checksum is another; pack it anew")
        return table, table.steps

    def _made_table(self, store: MdsStore, version: str, make: Callable[[str], None], most: int | None) -> StreamTable:
        """A table that is made once, and kept in the cache."""
        found = hashlib.sha256(f"{version} {self._stats(store._folder)}".encode()).hexdigest()[:16]
        name = f"{os.path.abspath(store._folder) if not is_url(store._folder) else store._folder}#{self.kind}.streams"
        size = 64 + 64 * int(self.firsts[-1])
        try:
            with store._cache.made(name, found, size, make) as local:
                return StreamTable(local.path, most)
        except StoreError as error:
            raise StoreError(f"{store._folder}: {error}") from error
        except ValueError as error:
            raise StoreError(f"{store._folder}: {error}") from error

    def _stats(self, folder: str) -> list[tuple[int, int]]:
        """What tells local shards from those that were there before."""
        if is_url(folder):
            return []
        found = []
        for shard in self.found.shards:
            for file in (shard.raw, shard.zip):
                path = in_folder(folder, file.basename) if file is not None else ""
                if path and os.path.exists(path):
                    found.append((os.stat(path).st_mtime_ns, os.stat(path).st_size))
        return found

    def extent(self, number: int) -> tuple[int, int]:
        """A stream's first sample, and how many there are."""
        if self.table is None:
            return int(self.firsts[number]), int(self.firsts[number + 1] - self.firsts[number])
        return int(self.table.starts[number]), int(self.table.steps[number])

    def key(self, number: int) -> str:
        """A stream's name."""
        if self.table is not None:
            return self.table.key(number)
        return self.found.shards[number].raw.basename if self.kind == "shard" else str(number)


def _is_rows(encoding: Encoding) -> bool:
    return isinstance(encoding, ListEncoding) or (isinstance(encoding, ArrayEncoding) and encoding.shape != ())


def _is_key(encoding: Encoding, name: str) -> bool:
    if isinstance(encoding, ArrayEncoding):
        return encoding.shape == () and encoding.dtype is not None and encoding.dtype.kind in "iu"
    return name in ("str", "bytes", "str_int", "str_decimal", "json")
