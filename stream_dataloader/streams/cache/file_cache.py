"""Local copies of remote files, fetched once into a directory that all processes share.

Guarantees:

- One process fetches a file, and the others wait. If it is killed, another takes over.
- A file gets its name after its last byte, and is not deleted while a `LocalFile` is open.
- A file that changed on its server is fetched again. The old one stays while it is read.
- Damaged tables in the cache are treated as missing.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import re
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import shown
from stream_dataloader.streams.cache.entry import CacheEntry, make_room
from stream_dataloader.streams.cache.own_folder import LocalFile, check_own_folder, make_own_folder
from stream_dataloader.streams.cache.remote import RemoteFile, SizeError, UnreachableError

__all__ = ["FileCache", "LocalFile", "cache_directory", "is_url", "keep_tables", "kept_tables", "open_local"]

_DIRECTORY, _LIMIT = "STREAM_DATALOADER_CACHE", "STREAM_DATALOADER_CACHE_BYTES"
_SHARED = "STREAM_DATALOADER_CACHE_SHARED"

#: Pattern of a URL: a protocol has more than one letter, and `::` chains file systems.
_URL = re.compile(r"([a-z][a-z0-9+.-]+)(://|::)", re.IGNORECASE)
_LIVE = {"rtsp", "rtsps", "rtspt", "rtspu", "rtp", "srtp", "rtmp", "rtmps", "rtmpt", "udp", "tcp", "tls", "srt", "mms"}

#: Options that locate a file, in lower case and without _.
_PLACE = {
    *("endpointurl", "endpoint", "host", "hostname", "port", "instance", "baseurl", "blobendpoint", "endpointsuffix"),
    *("accountname", "accounthost", "bucket", "share", "container", "path", "prefix", "fo", "targetprotocol"),
    *("org", "repo", "sha", "ref", "revision"),
}

#: The password in a URL.
_PASSWORD = re.compile(r"(://[^/:@]*):[^/@]*@")

_log = logging.getLogger("stream_dataloader")

#: Start of this run. Each run asks the server once more; forked workers belong to the run.
_RUN_BEGAN = time.time()


@dataclass(frozen=True, kw_only=True)
class FileCache:
    """Cache of remote files that processes share, with the options for fetching.

    Args:
        directory: A local directory. None: `files` in the directory that the environment variable
            STREAM_DATALOADER_CACHE names, else in `stream_dataloader` in the user's cache.
        size_limit_bytes: Largest size of all files together; the least recently used are deleted.
            None: the value of STREAM_DATALOADER_CACHE_BYTES, else no limit.
        storage_options: Options of fsspec's file systems, by protocol: `{"s3": {"anon": True}}`.
        check_seconds: Seconds until the server is asked again for changes. A new run always asks.
        timeout_seconds: Longest silence of a server before it is an error.
        wait_seconds: Longest time that another process may hold a file that it fetches without progress.
        shared: Users who trust each other share the directory. Otherwise it is created for this user
            alone, and it is an error if others may write to it. None: True if the environment
            variable STREAM_DATALOADER_CACHE_SHARED is 1.
        min_bytes_per_second: Least rate at which a file must arrive, on average over each `timeout_seconds`; 0: any
            rate.

    Raises:
        ValueError: A number is out of range, or the environment variable is not a number.

    Example:
        >>> import fsspec, pathlib, tempfile
        >>> with fsspec.open("memory://hello.txt", "w") as file:
        ...     _ = file.write("hello")
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     with FileCache(directory=directory).open("memory://hello.txt") as local:
        ...         print(pathlib.Path(local.path).read_text())
        hello
    """

    directory: str | os.PathLike[str] | None = None
    size_limit_bytes: int | None = None
    storage_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False, repr=False)
    check_seconds: float = 3600.0
    timeout_seconds: float = 15.0
    wait_seconds: float = 600.0
    shared: bool | None = None
    min_bytes_per_second: float = 1000.0

    def __post_init__(self) -> None:
        limit = self.size_limit_bytes
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit <= 0):
            raise ValueError(f"size_limit_bytes is {limit!r}; give 1 or more, or None for no limit")
        if not self.check_seconds >= 0:
            raise ValueError(f"check_seconds is {self.check_seconds!r}; give 0 or more")
        for name in ("timeout_seconds", "wait_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}; give more than 0")
        if not self.min_bytes_per_second >= 0:
            raise ValueError(f"min_bytes_per_second is {self.min_bytes_per_second!r}; give 0 or more")

    def open(self, path: str | os.PathLike[str]) -> LocalFile:
        """Return the local file of a URL or a path, and fetch it if it is not in the cache. Close it after reading.

        Raises:
            OSError: The file cannot be fetched; the message names the URL.
            ValueError: The file is larger than the limit, or the URL is not valid.
            ImportError: fsspec, or the package that it needs for this protocol, is not installed.
        """
        path = os.fsdecode(path)
        if not is_url(path):
            return LocalFile(path)
        if path.lower().startswith(("file://", "local://")):
            return LocalFile(unquote(path.split("://", 1)[1]))
        entry = self._entry(path)

        def checked() -> LocalFile | None:
            return entry.hold(since=max(_RUN_BEGAN, time.time() - self.check_seconds))

        return entry.get(checked, lambda: self._fetch(entry, path))

    def has(self, url: str) -> bool:
        """Return True if the cache has a copy, which may be old."""
        return bool(self._entry(url).versions())

    def made(self, name: str, version: str, size: int, make: Callable[[str], None]) -> LocalFile:
        """Return a file of at most `size` bytes that `make` writes to a path, once for all processes.

        The file is made again if `version` (letters and digits) changes.
        """
        entry = self._entry(name)

        def write() -> None:
            self._make_room(name, size, entry)
            make(entry.part)
            entry.take_in(version)

        return entry.get(lambda: entry.hold(version), write)

    def remote(self, url: str) -> RemoteFile:
        """Return the file on its server, without the cache."""
        return RemoteFile(url, self.storage_options, self.timeout_seconds, self.min_bytes_per_second)

    def _fetch(self, entry: CacheEntry, url: str) -> None:
        remote, versions = self.remote(url), entry.versions()
        try:
            current = bool(versions) and versions[0] in entry.versions(remote.ask()[0])
        except UnreachableError as error:
            _log.warning("%s; its copy in the cache is read instead", error)
            current = True
        if current:
            os.utime(versions[0])  # the server confirmed this version now
            return
        _log.info("fetching %s", shown(url))
        check_size = functools.partial(self._make_room, url, entry=entry)
        version = remote.fetch(entry.part, check_size, self._limit())
        self._make_room(url, os.path.getsize(entry.part), entry)
        entry.take_in(version)

    def _entry(self, url: str) -> CacheEntry:
        key, name = _named(url, repr(sorted(_places(self.storage_options))))
        shared = _is_shared() if self.shared is None else self.shared
        return CacheEntry(os.path.join(self._directory(), key), name, shared, self.wait_seconds)

    def _directory(self) -> str:
        if self.directory is not None:
            return os.path.abspath(os.path.expanduser(self.directory))
        return cache_directory("files")

    def _limit(self) -> int | None:
        if self.size_limit_bytes is not None or not (given := os.environ.get(_LIMIT)):
            return self.size_limit_bytes
        if not given.isdigit() or not int(given):
            raise ValueError(f"{_LIMIT} is {given!r}; give a number of bytes from 1 on")
        return int(given)

    def _make_room(self, url: str, size: int, entry: CacheEntry) -> None:
        if (limit := self._limit()) is None:
            return
        if size > limit:
            what = f"{shown(url)} has {size:,} bytes, and the cache's limit is {limit:,}"
            raise SizeError(f"{what}; raise size_limit_bytes or {_LIMIT}")
        make_room(self._directory(), size, limit, entry.part)


def is_url(path: Any) -> bool:
    """Return True for the URL of a file, but not for that of a network camera.

    Example:
        >>> [is_url(path) for path in ("https://host/a.mp4", "zip://a.npy::s3://bucket/b.zip", "C://a", "rtsp://host")]
        [True, True, False, False]
    """
    found = _URL.match(path) if isinstance(path, str) else None
    return found is not None and "://" in path and found[1].lower() not in _LIVE


def open_local(path: str | os.PathLike[str], cache: FileCache | None = None) -> LocalFile:
    """Return a local file, which stays until the result is closed."""
    return (_DEFAULT if cache is None else cache).open(path)


def cache_directory(kind: str) -> str:
    """Return the directory `kind` in this library's cache."""
    if found := os.environ.get(_DIRECTORY):
        return os.path.join(os.path.abspath(os.path.expanduser(found)), kind)
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    home = xdg if os.path.isabs(xdg) else os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(home, "stream_dataloader", kind)


def _is_shared() -> bool:
    return os.environ.get(_SHARED, "") == "1"


_DEFAULT = FileCache()


def _kept_at(folder: str, name: str) -> str:
    key = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    return os.path.join(cache_directory(folder), f"{key}.npz")


def keep_tables(folder: str, name: str, tables: Mapping[str, Any]) -> None:
    """Save arrays of numbers in a folder of the cache."""
    file = _kept_at(folder, name)
    with contextlib.suppress(OSError):
        make_own_folder(os.path.dirname(file), shared=_is_shared())
        with tempfile.NamedTemporaryFile(dir=os.path.dirname(file), suffix=".tmp", delete=False) as unfinished:
            try:
                np.savez(unfinished, **tables)
                unfinished.flush()
                os.replace(unfinished.name, file)
            except OSError:
                os.unlink(unfinished.name)


def kept_tables(folder: str, name: str) -> dict[str, NDArray[Any]] | None:
    """Return the saved arrays. None if there are none, they are damaged, or others may write to the folder."""
    path = _kept_at(folder, name)
    try:
        if not _is_shared():
            check_own_folder(os.path.dirname(path))
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as tables:
            return dict(tables)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return None


def _places(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the options that locate files. Credentials are not part of a file's name."""
    for key, value in options.items():
        if isinstance(value, Mapping):
            yield from _places(value)
        elif key == "connection_string":  # Azure
            yield from _places(dict(part.split("=", 1) for part in str(value).split(";") if "=" in part))
        elif key.lower().replace("_", "") in _PLACE:
            yield key, str(value)


@functools.lru_cache(1024)
def _named(url: str, places: str) -> tuple[str, str]:
    """Return the names of an entry's folder and of its file; `places` are the options that locate the URL."""
    place = _PASSWORD.sub(r"\1@", url)
    return hashlib.sha256(f"{place} {places}".encode()).hexdigest()[:24], _name_of(url)


def _name_of(url: str) -> str:
    """Return the file's own name, because some decoders need the suffix."""
    name = os.path.basename(unquote(urlsplit(url.split("::", maxsplit=1)[0]).path).rstrip("/"))
    if not name:
        name = os.path.basename(url.split("::", maxsplit=1)[0])
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[-80:] or "file"
