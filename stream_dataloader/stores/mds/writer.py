"""Writes MDS datasets, which mosaicml-streaming reads as its own.

Source: `streaming/base/format/base/writer.py` and `mds/writer.py` of mosaicml-streaming 0.13.

Guarantee: index.json is written, and sent, when all else is there; without it there is no dataset. What a sample may
not hold is an error when it is written.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any

import numpy as np

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.files import inside, read_json
from stream_dataloader.stores.mds.compression import check_compression, check_hash, extension_of, hash_of, pack
from stream_dataloader.stores.mds.index import INDEX, in_folder, write_index
from stream_dataloader.stores.mds.kinds import encoding_of
from stream_dataloader.streams.cache.file_cache import is_url
from stream_dataloader.streams.cache.remote import remote_file

__all__ = ["MdsWriter", "SampleEncoder", "ShardBuilder"]

_UNITS = {"": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}
_MOST_SHARD_BYTES = (1 << 32) - 1  # places in it are uint32
_UPLOADS = 4  # at a time


class SampleEncoder:
    """Turns samples into bytes.

    Args:
        columns: The encoding of each column.

    Raises:
        ValueError: There is no such encoding, or no column.
    """

    def __init__(self, columns: Mapping[str, str], bools: Sequence[str] = ()) -> None:
        if not columns:
            raise ValueError("columns is empty; name at least one, and its encoding")
        self.names = sorted(columns)
        self.kinds = [columns[name] for name in self.names]
        self._encodings = []
        for name, kind in zip(self.names, self.kinds, strict=True):
            try:
                self._encodings.append(encoding_of(kind, allow_pickle=True))
            except ValueError as error:
                raise ValueError(f"column {name!r}: {error}") from None
        for name in bools:
            self._encodings[self.names.index(name)].as_bool()  # type: ignore[attr-defined]
        self.sizes = [encoding.size for encoding in self._encodings]

    def encode(self, sample: Mapping[str, Any]) -> bytes:
        """A sample's bytes. Bytes are taken as they are, whatever the column's encoding.

        Raises:
            ValueError, TypeError: It lacks a column, or has a value that its encoding does not take.
        """
        sizes, parts = [], []
        for name, kind, encoding in zip(self.names, self.kinds, self._encodings, strict=True):
            if name not in sample:
                raise ValueError(f"a sample has no {name!r}; it has {shorten(list(sample))}")
            value = sample[name]
            try:
                part = bytes(value) if isinstance(value, (bytes, bytearray)) else encoding.encode(value)
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                kind_ = TypeError if isinstance(error, TypeError) else ValueError
                raise kind_(f"column {name!r}, encoding {kind!r}: {error}") from error
            if encoding.size is None:
                sizes.append(len(part))
            elif len(part) != encoding.size:
                raise ValueError(f"column {name!r}, encoding {kind!r}: {len(part)} bytes instead of {encoding.size}")
            parts.append(part)
        return np.array(sizes, "<u4").tobytes() + b"".join(parts)


class ShardBuilder:
    """Collects samples, and writes them as a shard.

    Args:
        folder: Where.
        encoder: Of the samples.
        compression: How to compress, or None.
        hashes: Which to make of each file.
        size_limit: How many bytes a shard has at most, unless one sample has more; None: one shard.

    Attributes:
        samples: That are collected.
        files: Names of all files that were written.

    Raises:
        ValueError: There is no such compression or hash, or the limit is none.
    """

    def __init__(
        self,
        folder: str,
        encoder: SampleEncoder,
        compression: str | None,
        hashes: Sequence[str] | None,
        size_limit: int | str | None,
    ) -> None:
        if compression is not None:
            check_compression(compression)
            pack(compression, b"")  # is its package there?
        for name in hashes or ():
            check_hash(name)
        self._folder = folder
        self._compression = compression
        self._hashes = sorted(set(hashes or ()))
        self._limit = None if size_limit is None else _size_of(size_limit)
        self._config = {
            "version": 2,
            "format": "mds",
            "compression": compression,
            "hashes": self._hashes,
            "size_limit": self._limit,
            "column_names": encoder.names,
            "column_encodings": encoder.kinds,
            "column_sizes": encoder.sizes,
        }
        self._config_bytes = json.dumps(self._config, sort_keys=True).encode()
        self.samples: list[bytes] = []
        self._size = 0
        self.files: list[str] = []

    def is_full(self, sample: bytes) -> bool:
        """Whether the shard has to be written before a sample is added."""
        size = self._size + 8 + len(self._config_bytes) + 4 * (len(self.samples) + 1) + len(sample)
        limit = _MOST_SHARD_BYTES if self._limit is None else self._limit
        return bool(self.samples) and size > limit

    def add(self, sample: bytes) -> None:
        """Collect a sample."""
        self.samples.append(sample)
        self._size += len(sample)

    def drop(self, count: int) -> None:
        """Forget all samples but the first ones."""
        self._size -= sum(map(len, self.samples[count:]))
        del self.samples[count:]

    def write(self, name: str) -> dict[str, Any]:
        """Write what was collected as a shard, and begin another one.

        Args:
            name: Of the file, before `.mds`.

        Returns:
            Its entry in the index.

        Raises:
            ValueError: A sample is too large.
        """
        head = 8 + 4 * len(self.samples) + len(self._config_bytes)
        offsets = head + np.cumsum([0, *map(len, self.samples)])
        if offsets[-1] > _MOST_SHARD_BYTES:
            raise ValueError(f"a sample has {self._size:,} bytes, and a shard has {_MOST_SHARD_BYTES:,} at most")
        count = len(self.samples).to_bytes(4, "little")
        raw = b"".join([count, offsets.astype("<u4").tobytes(), self._config_bytes, *self.samples])
        basename, zipped = f"{name}.mds", None
        entry = {"samples": len(self.samples), "raw_data": self._told(basename, raw)}
        if self._compression is not None:
            basename, raw = f"{basename}.{extension_of(self._compression)}", pack(self._compression, raw)
            zipped = self._told(basename, raw)
        self.files.append(basename)
        with open(os.path.join(self._folder, basename), "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        self.samples, self._size = [], 0
        return entry | {"zip_data": zipped} | self._config

    def _told(self, basename: str, data: bytes) -> dict[str, Any]:
        return {
            "basename": basename,
            "bytes": len(data),
            "hashes": {name: hash_of(name, data) for name in self._hashes},
        }


def _size_of(limit: int | str) -> int:
    """A limit in bytes, which may be text like "64mb"."""
    found = limit
    if isinstance(limit, str):
        parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?b?)\s*", limit.lower())
        unit = _UNITS.get("" if parts is None or parts[2] == "b" else parts[2])
        if parts is None or unit is None:
            raise ValueError(f"size_limit is {limit!r}; give a number of bytes, or '100kb', '64mb', '1gb'")
        found = int(float(parts[1]) * unit)
    if isinstance(found, bool) or not isinstance(found, int) or not 0 < found <= _MOST_SHARD_BYTES:
        raise ValueError(f"size_limit is {limit!r}; give 1 to {_MOST_SHARD_BYTES:,} bytes, or None for one shard")
    return found


class MdsWriter:
    """Writes an MDS dataset, sample by sample; a context manager.

    If it is left by an error, what it wrote is deleted, and there is no dataset.

    Args:
        out: A folder; a URL of any protocol that fsspec knows; or a folder and a URL, `(local, remote)`: shards are
            written to the folder, and sent while the next are written.
        columns: The encoding of each column, such as `{"x": "ndarray:uint8:64,64,3", "label": "int"}`.
        compression: `"zstd"`, `"gz"`, `"bz2"`, `"br"` or `"snappy"`, with `":level"` behind all but the last.
        hashes: Of each file, such as `["sha1"]` or `["xxh64"]`; they are compared when a shard is fetched or unpacked.
        size_limit: How many bytes a shard has at most, before compression; also as `"64mb"`; None: all in one shard.
        keep_local: With `(local, remote)`, keep the files in the folder when all are sent.
        exist_ok: Write over a dataset that is there. False: the folder must be empty, and no dataset at the URL.
        progress: Show a bar that counts samples.
        storage_options: Options of fsspec's file systems, by protocol.
        timeout_seconds: How long a server may be silent before that is an error.

    Raises:
        ValueError: An option has another value.
        FileExistsError: There is something already.
        ImportError: A package is missing for the compression, a hash or the URL.

    Example:
        >>> import tempfile
        >>> from stream_dataloader.stores import MdsStore, MdsWriter
        >>> folder = tempfile.mkdtemp()
        >>> with MdsWriter(folder, columns={"text": "str"}, compression="gz", hashes=["sha1"]) as writer:
        ...     writer.write({"text": "hello"})
        >>> next(MdsStore(folder)(0))
        {'text': 'hello'}
    """

    def __init__(
        self,
        out: str | os.PathLike[str] | tuple[str | os.PathLike[str], str],
        *,
        columns: Mapping[str, str],
        compression: str | None = None,
        hashes: Sequence[str] | None = None,
        size_limit: int | str | None = 1 << 26,
        keep_local: bool = True,
        exist_ok: bool = False,
        progress: bool = False,
        storage_options: Mapping[str, Mapping[str, Any]] | None = None,
        timeout_seconds: float = 15.0,
    ) -> None:
        local, self._remote = _places(out)
        self._connection = (dict(storage_options or {}), timeout_seconds)
        if self._remote is not None and not exist_ok and self._is_at(in_folder(self._remote, INDEX)):
            raise FileExistsError(f"there is a dataset at {self._remote}; exist_ok=True writes over it")
        self._encoder = SampleEncoder(columns)
        self._temporary = tempfile.TemporaryDirectory(prefix="mds-") if local is None else None
        self.folder = local if self._temporary is None else self._temporary.name
        assert self.folder is not None
        self._keep_local = keep_local or self._remote is None
        self._builder = ShardBuilder(self.folder, self._encoder, compression, hashes, size_limit)
        self._entries: list[dict[str, Any]] = []
        self._count = 0
        self._uploads: list[Future[None]] = []
        self._pool: ThreadPoolExecutor | None = None
        self._done = False
        _make_way(self.folder, exist_ok)
        if self._remote is not None:
            self._pool = ThreadPoolExecutor(_UPLOADS, thread_name_prefix="stream_dataloader upload")
        self._bar = _bar() if progress else None

    def write(self, sample: Mapping[str, Any]) -> None:
        """Write a sample; keys that are no columns are passed over.

        Args:
            sample: A value for each column. Bytes are written as they are, whatever the encoding.

        Raises:
            ValueError: It lacks a column, or has a value that its encoding does not take; nothing is written then.
            TypeError: As ValueError, where the value's type is another.
            OSError: The disk is full, or a shard could not be sent.
        """
        if self._done:
            raise ValueError("the writer is finished; open another one")
        try:
            encoded = self._encoder.encode(sample)
        except (TypeError, ValueError) as error:
            raise type(error)(f"sample {self._count}: {error}") from error
        if self._builder.is_full(encoded):
            self._flush()
        self._builder.add(encoded)
        self._count += 1
        if self._bar is not None:
            self._bar.update()

    def _flush(self) -> None:
        for upload in [upload for upload in self._uploads if upload.done()]:
            self._uploads.remove(upload)
            upload.result()
        self._entries.append(self._builder.write(f"shard.{len(self._entries):05}"))
        if self._pool is not None:
            self._uploads.append(self._pool.submit(self._send, self._builder.files[-1]))

    def finish(self) -> None:
        """Write what is left, and index.json at last; also called where the context ends. A second time: nothing.

        Raises:
            OSError: The disk is full, or something could not be sent.
        """
        if self._done:
            return
        try:
            if self._builder.samples:
                self._flush()
            while self._uploads:
                self._uploads.pop(0).result()
            assert self.folder is not None
            write_index(self.folder, self._entries)
            if self._pool is not None:
                self._pool.submit(self._send, INDEX).result()
        except BaseException:
            self.abort()
            raise
        self._end(delete=not self._keep_local)

    def abort(self) -> None:
        """Delete what was written to the folder, and write no index; what was sent stays, unused."""
        self._end(delete=True)

    def _end(self, *, delete: bool) -> None:
        if self._done:
            return
        self._done = True
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        if self._bar is not None:
            self._bar.close()
        assert self.folder is not None
        if delete:
            for name in (INDEX, *self._builder.files):
                with suppress(FileNotFoundError):
                    os.unlink(os.path.join(self.folder, name))
        if self._temporary is not None:
            self._temporary.cleanup()

    def _send(self, name: str) -> None:
        assert self._remote is not None
        assert self.folder is not None
        with remote_file(in_folder(self._remote, name), *self._connection) as remote:
            remote.put(os.path.join(self.folder, name))

    def _is_at(self, url: str) -> bool:
        try:
            with remote_file(url, *self._connection) as remote:
                remote.info()
        except FileNotFoundError:
            return False
        return True

    def __enter__(self) -> MdsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is None:
            self.finish()
        else:
            self.abort()


def _places(out: Any) -> tuple[str | None, str | None]:
    """The folder and the URL to write to; one of them may be None."""
    if isinstance(out, (tuple, list)):
        if len(out) != 2 or is_url(os.fspath(out[0])) or not is_url(out[1]):
            raise ValueError(f"out is {out!r}; give a folder, a URL, or (folder, URL)")
        return os.path.expanduser(os.fspath(out[0])), str(out[1])
    path = os.fspath(out)
    return (None, path) if is_url(path) else (os.path.expanduser(path), None)


def _make_way(folder: str, exist_ok: bool) -> None:
    """Make a folder to write to, and delete the dataset that it has."""
    os.makedirs(folder, exist_ok=True)
    if not (names := os.listdir(folder)):
        return
    if not exist_ok:
        raise FileExistsError(f"{folder} is not empty; exist_ok=True writes over the dataset in it")
    if INDEX not in names:
        return
    path = os.path.join(folder, INDEX)
    with suppress(StoreError, KeyError, TypeError, AttributeError):
        files = [shard[key] for shard in read_json(path, dict)["shards"] for key in ("raw_data", "zip_data")]
        paths = [inside(folder, file["basename"], path) for file in files if file]
        os.unlink(path)  # first, so that it never names what is gone
        for shard in paths:
            with suppress(FileNotFoundError):
                os.unlink(shard)
    with suppress(FileNotFoundError):
        os.unlink(path)


def _bar() -> Any:
    from tqdm import tqdm

    return tqdm(unit=" samples", desc="writing")
