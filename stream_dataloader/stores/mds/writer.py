"""Writes MDS datasets, which mosaicml-streaming reads as its own.

Guarantee: index.json is written, and sent, when all else is there; without it there is no dataset. What a sample may
not hold is an error when it is written.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import inside, read_json
from stream_dataloader.stores.mds.builder import SampleEncoder, ShardBuilder
from stream_dataloader.stores.mds.index import INDEX, in_folder, write_index
from stream_dataloader.streams.cache.file_cache import is_url
from stream_dataloader.streams.cache.remote import remote_file

__all__ = ["MdsWriter"]

_UPLOADS = 4  # at a time


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
