"""Remote files as local ones: fetched once by all processes together, into a directory that all of them share.

Guarantees:

- A file is fetched by one process; the others wait for it, and go on at once if that process is killed.
- What lies in the cache under its name is whole: it gets the name after its last byte. What a killed process
  left half done is written over, or swept out.
- A file is never deleted while a `LocalFile` of it is open, so there is no moment between getting its path and
  opening it in which it may vanish.
- A file that changed on its server is fetched anew; the old one stays for as long as it is read.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from stream_dataloader.streams.cache.entry import CacheEntry, LocalFile, delete_file, stored_files
from stream_dataloader.streams.cache.remote import FileInfo, RemoteFile, UnreachableError, remote_file

__all__ = ["FileCache", "LocalFile", "cache_directory", "is_url", "local_path", "open_local"]

_DIRECTORY, _LIMIT = "STREAM_DATALOADER_CACHE", "STREAM_DATALOADER_CACHE_BYTES"

#: More than one letter, for Windows' drives; `::` chains file systems.
_URL = re.compile(r"([a-z][a-z0-9+.-]+)(://|::)", re.IGNORECASE)
_LIVE = {"rtsp", "rtsps", "rtspt", "rtspu", "rtp", "srtp", "rtmp", "rtmps", "rtmpt", "udp", "tcp", "tls", "srt", "mms"}

#: Directories that this run looked through for what killed processes left.
_swept: set[str] = set()

_log = logging.getLogger("stream_dataloader")


@dataclass(frozen=True, kw_only=True)
class FileCache:
    """Where remote files are kept, and how they are fetched.

    All processes that are to share files must be given the same directory; to workers, settings go with the stream
    factory that has them, or by the environment.

    Args:
        directory: On a local disk; made if it does not exist. By default what the environment variable
            STREAM_DATALOADER_CACHE names, else `stream_dataloader` in the user's cache directory; `files` in that.
        size_limit_bytes: What all files may take together; those that were not used for longest are deleted for a
            new one. May be exceeded by files in use and in the middle of being fetched. By default what
            STREAM_DATALOADER_CACHE_BYTES says, else no limit.
        storage_options: Options of fsspec's file systems, by protocol: `{"s3": {"anon": True}}`.
        check_seconds: Within a run, a file that was looked up on its server less than that ago is not asked for
            again. A new run asks in any case.
        timeout_seconds: How long a server may be silent before that is an error.

    Raises:
        ValueError: A number is negative, or the environment's is none.

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

    def __post_init__(self) -> None:
        limit = self.size_limit_bytes
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit <= 0):
            raise ValueError(f"size_limit_bytes is {limit!r}; give a number of bytes from 1 on, or None for no limit")
        if not self.check_seconds >= 0:
            raise ValueError(f"check_seconds is {self.check_seconds!r}; give 0 (ask the server each time) or more")
        if not self.timeout_seconds > 0:
            raise ValueError(f"timeout_seconds is {self.timeout_seconds!r}; give more than 0")

    def open(self, path: str | os.PathLike[str]) -> LocalFile:
        """Have a file here.

        Args:
            path: A URL of any protocol that fsspec knows; a path of a local file is returned as it is.

        Returns:
            Where it is, to be closed when it is no longer read.

        Raises:
            OSError: It is not there, may not be read, or cannot be fetched; names the URL.
            ValueError: It is larger than the limit, or the URL is none.
            ImportError: fsspec, or what it needs for this protocol, is not installed.
        """
        path = os.fsdecode(path)
        if not is_url(path):
            return LocalFile(path)
        if path.lower().startswith(("file://", "local://")):
            return LocalFile(unquote(path.split("://", 1)[1]))
        return self._open_url(path)

    def _open_url(self, url: str) -> LocalFile:
        entry = self._entry(url)
        if entry.was_checked(self.check_seconds) and (file := entry.hold()) is not None:
            return file
        began = time.time()
        with entry.locked():
            if entry.was_checked(self.check_seconds) and (file := entry.hold()) is not None:
                return file
            entry.raise_failure(began)
            try:
                return self._fetched(entry, url)
            except (OSError, ValueError) as error:
                entry.note_failure(error)
                raise

    def _fetched(self, entry: CacheEntry, url: str) -> LocalFile:
        """The file, asked for and fetched if it must be; the entry is locked."""
        self._sweep()
        entry.drop_old()
        old = entry.hold()
        try:
            with remote_file(url, self.storage_options, self.timeout_seconds) as remote:
                try:
                    info = remote.info()
                except UnreachableError as error:
                    if old is None:
                        raise
                    _log.warning("%s; its copy in the cache is read instead", error)
                    file, old = old, None
                else:
                    if old is not None and entry.version_of(old.path) == info.version:
                        file, old = old, None
                    else:
                        if old is not None:
                            old.close()
                        file = self._downloaded(entry, url, remote, info)
        finally:
            if old is not None:
                old.close()
        entry.note_check()
        return file

    def _downloaded(self, entry: CacheEntry, url: str, remote: RemoteFile, info: FileInfo) -> LocalFile:
        _log.info("fetching %s, %s bytes", url, info.size)
        self._make_room(url, info.size or 0)
        try:
            remote.fetch(entry.part, info.size)
            self._make_room(url, os.path.getsize(entry.part), but=entry.part)
            return entry.take_in(info.version)
        except BaseException:
            with suppress(OSError):
                os.unlink(entry.part)
            raise

    def _entry(self, url: str) -> CacheEntry:
        options = repr(sorted((key, sorted(value.items())) for key, value in self.storage_options.items()))
        key = hashlib.sha256(f"{url} {options}".encode()).hexdigest()[:24]
        return CacheEntry(os.path.join(self._directory(), key), _name_of(url))

    def _directory(self) -> str:
        if self.directory is not None:
            return os.path.abspath(os.path.expanduser(self.directory))
        return cache_directory("files")

    def _limit(self) -> int | None:
        if self.size_limit_bytes is not None or not (given := os.environ.get(_LIMIT)):
            return self.size_limit_bytes
        if not given.isdigit() or not int(given):
            raise ValueError(f"the environment variable {_LIMIT} is {given!r}; give a number of bytes from 1 on")
        return int(given)

    def _make_room(self, url: str, size: int, but: str = "") -> None:
        """Delete what was not used for longest, until `size` bytes more are within the limit."""
        limit = self._limit()
        if limit is None:
            return
        if size > limit:
            raise ValueError(
                f"{url} has {size:,} bytes, and the cache's limit is {limit:,}; raise size_limit_bytes or {_LIMIT}"
            )
        stored = [file for file in stored_files(self._directory()) if file.path != but]
        total = sum(file.size for file in stored)
        for file in sorted(stored):
            if total + size <= limit:
                return
            if delete_file(file.path):
                total -= file.size

    def _sweep(self) -> None:
        """Delete what processes that were killed left half done; once a run."""
        directory = self._directory()
        if directory in _swept:
            return
        _swept.add(directory)
        for file in stored_files(directory):
            if os.path.basename(file.path) == "part":
                delete_file(file.path)


def is_url(path: Any) -> bool:
    """Whether this is a URL of a file; network cameras' are none, nor are Windows' drives.

    Example:
        >>> [is_url(path) for path in ("https://host/a.mp4", "zip://a.npy::s3://bucket/b.zip", "C://a", "rtsp://host")]
        [True, True, False, False]
    """
    found = _URL.match(path) if isinstance(path, str) else None
    return found is not None and "://" in path and found[1].lower() not in _LIVE


def open_local(path: str | os.PathLike[str], cache: FileCache | None = None) -> LocalFile:
    """Have a file here, for as long as the result is open: a local path as it is, a URL through the cache.

    Args:
        path: A path or URL.
        cache: By default the one that the environment describes.

    Raises:
        OSError: See `FileCache.open`, and ValueError and ImportError too.

    Example:
        >>> open_local("clip.mp4").path
        'clip.mp4'
    """
    return (_DEFAULT if cache is None else cache).open(path)


def local_path(path: str | os.PathLike[str], cache: FileCache | None = None) -> str:
    """The path of a file here, to be opened at once: nothing keeps it where it is; otherwise as `open_local`.

    In a cache with a size limit another process may delete it for its own before it is opened.

    Example:
        >>> local_path("clip.mp4")
        'clip.mp4'
    """
    with open_local(path, cache) as file:
        return file.path


def cache_directory(kind: str) -> str:
    """Where this library keeps what can be had again, `kind` being a directory in it."""
    if found := os.environ.get(_DIRECTORY):
        return os.path.join(os.path.abspath(os.path.expanduser(found)), kind)
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    home = xdg if os.path.isabs(xdg) else os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(home, "stream_dataloader", kind)


_DEFAULT = FileCache()


def _name_of(url: str) -> str:
    """The file's own name, as far as it is fit for one here; decoders go by its end."""
    name = os.path.basename(unquote(urlsplit(url.split("::", maxsplit=1)[0]).path).rstrip("/"))
    if not name:
        name = os.path.basename(url.split("::", maxsplit=1)[0])
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[-80:] or "file"
