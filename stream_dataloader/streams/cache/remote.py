"""One file on a server, seen through fsspec: what it is now, and its bytes.

Guarantee: nothing is left behind. By default fsspec keeps a thread, an event loop and open connections for the life of
the process, and a forked worker that closes its copies of them disturbs the parent's. So each file gets a loop and a
connection of its own, which end with it. A failure is a builtin error that names the URL (`remote_errors`). One that
may pass is tried again, a few times within two seconds.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

from stream_dataloader.streams.cache.remote_errors import final_error, text_of, timed_out

__all__ = ["FileInfo", "RemoteFile", "UnreachableError", "remote_file"]

_WAIT_SECONDS = (0.2, 0.5, 1.0)  # before each further try

#: What tells one version of a file from the next, as the servers name it, in lower case and without - and _.
_VERSION = {
    *("etag", "lastmodified", "mtime", "modified", "updated", "created", "datetime", "generation", "versionid"),
    *("checksum", "crc", "crc32c", "md5", "md5hash", "contentmd5", "digest", "size"),
}

Result = TypeVar("Result")


class UnreachableError(ConnectionError):
    """The server did not answer, or the connection broke off: nothing is known about the file."""


class FileInfo(NamedTuple):
    """What a server says about a file.

    Attributes:
        version: Another one whenever the file has changed.
        size: Bytes; None where the server does not tell.
    """

    version: str
    size: int | None


class _Answer:
    """What the server's last answer says of its own end."""

    #: Nothing marks it but that the connection closes, as it also does when it breaks off (RFC 9112, 6.3).
    ends_anywhere = False

    def trace(self) -> Any:
        """What has aiohttp tell of each answer."""
        from aiohttp import TraceConfig

        traced = TraceConfig()
        traced.on_request_end.append(self._note)
        return traced

    async def _note(self, _session: Any, _context: Any, ended: Any) -> None:
        headers = ended.response.headers
        chunked = "chunked" in headers.get("Transfer-Encoding", "").lower()
        self.ends_anywhere = not chunked and "Content-Length" not in headers


class RemoteFile:
    """One file on a server, while `remote_file` keeps the connection."""

    def __init__(self, url: str, file_system: Any, path: str, timeout_seconds: float, answer: _Answer) -> None:
        self._url = url
        self._file_system = file_system
        self._path = path
        self._timeout_seconds = timeout_seconds
        self._answer = answer
        self._last_size = -1  # bytes that the try before got, where the server does not tell how many there are

    def info(self) -> FileInfo:
        """Ask the server.

        Raises:
            UnreachableError: It does not answer.
            OSError: There is no such file, it is a directory, or it may not be read.
        """
        known = self._tried(self._ask)
        if known.get("type") == "directory":
            raise IsADirectoryError(f"{self._url} is a directory; give the files in it")
        version = {
            key: str(value)
            for key, value in sorted(known.items())
            if key.lower().replace("-", "").replace("_", "") in _VERSION
        }
        size = known.get("size")
        return FileInfo(
            hashlib.sha256(json.dumps(version).encode()).hexdigest()[:16], None if size is None else int(size)
        )

    def fetch(self, path: str, size: int | None) -> None:
        """Write the file's bytes to a local one.

        Args:
            path: Of the local file, which may exist.
            size: How many bytes they must be, if that is known.

        Raises:
            UnreachableError: The server broke off before the end.
            OSError: As for `info`, or the bytes cannot be written.
        """
        self._tried(lambda: self._download(path, size))

    def put(self, path: str) -> None:
        """Write a local file's bytes to the server.

        Args:
            path: Of the local file.

        Raises:
            UnreachableError: The server broke off before the end.
            OSError: The server does not take it.
        """
        self._tried(lambda: self._upload(path))

    def _upload(self, path: str) -> None:
        with suppress(Exception):  # what has no folders need not be asked for one
            self._file_system.makedirs(self._file_system._parent(self._path), exist_ok=True)
        self._file_system.put_file(path, self._path)
        self._file_system.invalidate_cache()
        size, found = os.path.getsize(path), self._ask().get("size")
        if found is not None and found != size:
            raise ConnectionError(f"{size:,} bytes were sent, and the server has {found:,}")

    def _ask(self) -> dict[str, Any]:
        file_system = self._file_system
        if not getattr(file_system, "async_impl", False):
            return dict(file_system.info(self._path))
        from fsspec.asyn import sync

        return dict(sync(file_system.loop, file_system._info, self._path, timeout=self._timeout_seconds))

    def _download(self, path: str, size: int | None) -> None:
        from fsspec.callbacks import Callback

        told = Callback()
        self._file_system.get_file(self._path, path, callback=told)
        found = os.path.getsize(path)
        for expected in (size, told.size):
            if expected is not None and found != expected:
                raise ConnectionError(f"{found:,} bytes arrived, and the server has {expected:,}")
        if size is None and told.size is None and self._answer.ends_anywhere:
            before, self._last_size = self._last_size, found
            # The end of such an answer looks like a connection that broke off. Two tries of one size are believed.
            if found != before:
                tries = f"{found:,} bytes arrived" if before < 0 else f"{before:,} bytes arrived, then {found:,}"
                raise ConnectionError(f"{tries}, and the server does not tell how many there are")

    def _tried(self, action: Callable[[], Result]) -> Result:
        """What an action returns, tried again where that may help."""
        began = time.monotonic()
        for tries, wait in enumerate((*_WAIT_SECONDS, None), 1):
            try:
                return action()
            except Exception as error:
                if (known := final_error(self._url, error)) is not None:
                    raise known from error
                if wait is None or timed_out(error):  # who waited for a timeout has waited long enough
                    raise UnreachableError(
                        f"{self._url} could not be fetched ({tries} tries in {time.monotonic() - began:.1f} s): "
                        f"{text_of(error)}; check the address, the network and the server"
                    ) from error
            time.sleep(wait)
        raise AssertionError("the last try returns or raises")


@contextmanager
def remote_file(
    url: str, storage_options: Mapping[str, Mapping[str, Any]], timeout_seconds: float
) -> Iterator[RemoteFile]:
    """Connect to a file's server, and hang up afterwards.

    Args:
        url: Of any protocol that fsspec knows, or a chain of them (`zip://clip.mp4::https://host/clips.zip`).
        storage_options: The options of fsspec's file systems, by protocol.
        timeout_seconds: The longest that the server may be silent.

    Raises:
        ImportError: fsspec is not installed, or what it needs for this protocol.
        ValueError: fsspec does not know the protocol, or an option.
    """
    try:
        from fsspec import get_filesystem_class
        from fsspec.core import split_protocol, url_to_fs
    except ImportError as error:
        raise ImportError(f"reading {url} needs fsspec: pip install 'stream-dataloader[fsspec]'") from error
    answer = _Answer()
    with _event_loop() as loop:
        options: dict[str, dict[str, Any]] = {}
        try:
            for link in url.split("::"):
                protocol = split_protocol(link)[0] or link
                kind = get_filesystem_class(protocol)
                options[protocol] = _options(protocol, storage_options.get(protocol, {}), timeout_seconds, answer)
                options[protocol] |= {"skip_instance_cache": True}
                if getattr(kind, "async_impl", False):
                    options[protocol] |= {"loop": loop}
            file_system, path = url_to_fs(url, **options)
        except ImportError as error:
            raise ImportError(
                f"reading {url} needs a package that is not installed: {error} "
                "(pip install 'stream-dataloader[fsspec]' brings what http:// and https:// need; s3:// needs s3fs, "
                "gs:// gcsfs, abfs:// adlfs)"
            ) from error
        except Exception as error:
            if (known := final_error(url, error)) is None:
                raise UnreachableError(f"{url} could not be opened: {text_of(error)}; check the address") from error
            raise known from error
        if hasattr(file_system, "retries"):
            file_system.retries = 1  # s3fs and gcsfs would multiply their own with ours
        try:
            yield RemoteFile(url, file_system, path, timeout_seconds, answer)
        finally:
            _hang_up(file_system, loop)


def _options(protocol: str, given: Mapping[str, Any], timeout_seconds: float, answer: _Answer) -> dict[str, Any]:
    """A file system's options: those given, and else what makes it fail in good time, and fetch bytes as they are."""
    if protocol in ("http", "https"):
        from aiohttp import ClientTimeout

        # no limit to the whole, which is five minutes by default: files may be large
        timeout = ClientTimeout(
            total=None, connect=timeout_seconds, sock_connect=timeout_seconds, sock_read=timeout_seconds
        )
        client = {"timeout": timeout, "auto_decompress": False, **given.get("client_kwargs", {})}
        client["trace_configs"] = [*(client.get("trace_configs") or ()), answer.trace()]
        headers = {"Accept-Encoding": "identity", **given.get("headers", {})}
        return {**given, "client_kwargs": client, "headers": headers}
    if protocol in ("s3", "s3a"):
        config: dict[str, Any] = {"connect_timeout": timeout_seconds, "read_timeout": timeout_seconds}
        config |= {"retries": {"total_max_attempts": 1}}
        return {**given, "config_kwargs": {**config, **given.get("config_kwargs", {})}}
    return dict(given)


@contextmanager
def _event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that runs in a thread of its own; both are gone afterwards."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="stream_dataloader fetch", daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        asyncio.run_coroutine_threadsafe(_cancel_all(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _cancel_all() -> None:
    """End what an interrupt (Ctrl-C in the middle of a download) left running."""
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)  # transports that were closed say so in the next round


def _hang_up(file_system: Any, loop: asyncio.AbstractEventLoop) -> None:
    """Close a file system's connections, and those of the ones it is built upon."""
    while file_system is not None:
        session = getattr(file_system, "_session", None) or getattr(file_system, "_s3creator", None)
        if session is not None and callable(close := getattr(file_system, "close_session", None)):
            close(loop, session)
        below = getattr(getattr(file_system, "of", None), "fs", None)  # of an archive; of a cache or a folder:
        file_system = below if below is not None else getattr(file_system, "fs", None)
