"""A file on a server, accessed through fsspec: its version and its bytes.

Guarantee: a process has one client for each server. A failure is a builtin error that names the URL.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urljoin

from stream_dataloader.errors import shown

__all__ = ["RemoteFile", "SizeError", "UnreachableError", "final_error", "text_of"]

_WAIT_SECONDS = (0.2, 0.5, 1.0)  # before each further try

_HTTP, _S3, _GCS = ("http", "https"), ("s3", "s3a"), ("gs", "gcs")

#: Keys of a file's metadata that differ between its versions, in lower case and without - and _.
_VERSION = {
    *("etag", "lastmodified", "mtime", "modified", "modify", "updated", "created", "datetime", "generation"),
    *("versionid", "checksum", "crc", "crc32c", "md5", "md5hash", "contentmd5", "digest", "size"),
}

#: A larger file may take several requests, and may change between them.
_ONE_REQUEST_BYTES = 1 << 20

#: Bytes of a part that are read at a time.
_PIECE_BYTES = 1 << 18

#: Request timeout, too early (RFC 8470), too many requests.
_SERVER_IS_BUSY = (408, 425, 429)

#: Longest wait until a copy ends that was interrupted. One that had not begun never tells its end.
_CANCEL_SECONDS = 2.0

#: Errors of this machine's disk, rather than of the network.
_OURS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG, errno.EMFILE, errno.ENFILE)

#: Clients, kept alive here: in a forked process fsspec would release them, which ends the parent's connections.
_held: dict[int, Any] = {}


class UnreachableError(ConnectionError):
    """The server did not answer, or the connection broke off."""


class SizeError(ValueError):
    """The size of the file is not the expected one."""


class RemoteFile:
    """One file, by any protocol that fsspec knows, or a chain of protocols.

    Args:
        url: URL of the file.
        storage_options: Options of fsspec's file systems, by protocol.
        timeout_seconds: Longest silence of a server.
        least_rate: Least number of bytes per second, on average over each `timeout_seconds`.
    """

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, Mapping[str, Any]],
        timeout_seconds: float,
        least_rate: float = 0.0,
    ) -> None:
        self._url, self._timeout_seconds, self._least_rate = url, timeout_seconds, least_rate
        self._last_size = -1  # number of bytes of the last try, if the server gives no size
        options: dict[str, dict[str, Any]] = {}
        try:
            from fsspec import get_filesystem_class
            from fsspec.core import split_protocol, url_to_fs

            for link in url.split("::"):
                protocol = split_protocol(link)[0] or link
                options[protocol] = _options(protocol, storage_options.get(protocol, {}), timeout_seconds)
                if not get_filesystem_class(protocol).async_impl:  # a client of that kind serves one thread
                    options[protocol] |= {"skip_instance_cache": True}
            self._file_system, self._path = url_to_fs(url, **options)
        except ImportError as error:
            remedy = "pip install 'stream-dataloader[remote]'; s3:// needs s3fs, gs:// gcsfs, abfs:// adlfs"
            raise ImportError(f"{shown(url)} needs a package that is not installed: {error} ({remedy})") from error
        except Exception as error:
            if (known := final_error(url, error)) is None:
                raise UnreachableError(f"{shown(url)} could not be opened: {text_of(error)}") from error
            raise known from error
        if hasattr(self._file_system, "retries"):
            self._file_system.retries = 1  # else the retries of s3fs and gcsfs would multiply with ours
        _hold(self._file_system)

    def ask(self) -> tuple[str, int | None]:
        """Return the server's version of the file, and its size or None."""
        found: tuple[str, int | None] = self._tried(self._ask)
        return found

    def part(self, start: int, size: int) -> tuple[bytes, str, int | None]:
        """Return some bytes of the file, and the result of `ask`."""
        found = self._tried(lambda: self._bytes(start, size))
        version, whole = self.ask()
        if len(found) != size:
            raise SizeError(f"{shown(self._url)}: {len(found):,} bytes came, and {size:,} were asked for")
        return found, version, whole

    def _bytes(self, start: int, size: int) -> bytes:
        from fsspec.asyn import sync
        from fsspec.implementations.http import HTTPFileSystem

        if size and isinstance(self._file_system, HTTPFileSystem):
            return bytes(sync(self._file_system.loop, self._by_range, start, size))
        return bytes(self._file_system.cat_file(self._path, start=start, end=start + size))

    async def _by_range(self, start: int, size: int) -> bytearray:
        """Ask an HTTP server for some bytes. If it sends the whole file or too much, stop at once."""

        def count(arrived: int) -> None:
            if arrived > size:
                raise SizeError(f"{shown(self._url)}: more bytes come than the {size:,} that were asked for")

        system, found = self._file_system, bytearray()
        options = {**system.kwargs, "headers": {**system.kwargs.get("headers", {})}}
        options["headers"]["Range"] = f"bytes={start}-{start + size - 1}"
        session, arrival = await system.set_session(), _arrival(count, self._least_rate, self._timeout_seconds)
        async with session.get(system.encode_url(self._path), **options) as answer:
            answer.raise_for_status()
            if start and answer.status != 206:
                what = f"{shown(self._url)}: the server answered a request for a part with the status {answer.status}"
                raise SizeError(f"{what}; use one that knows ranges, or copy the folder")
            async for piece in answer.content.iter_chunked(_PIECE_BYTES):
                arrival.relative_update(len(piece))
                found += piece
        return found

    def send(self, path: str) -> None:
        """Write a local file to the server."""
        self._tried(lambda: self._run("put_file", path, self._path), "sent")

    def fetch(self, path: str, check_size: Callable[[int], None], limit: int | None = None) -> str:
        """Write the file to a local file; return its version.

        Args:
            path: The local file.
            check_size: Function that makes room for a number of bytes, or raises if it is too large. It is called with
                the size that the server gives, or when more bytes than `limit` have arrived.
            limit: Largest number of bytes if the server gives no size; None: any number.
        """
        return str(self._tried(lambda: self._download(path, check_size, limit)))

    def _ask(self) -> tuple[str, int | None]:
        from fsspec.asyn import sync

        system = self._file_system
        if system.async_impl:
            known = sync(system.loop, system._info, self._path, timeout=self._timeout_seconds)
        else:
            known = system.info(self._path)
        if known.get("type") == "directory":
            raise IsADirectoryError(f"{shown(self._url)} is a directory; give the files in it")
        named = {key.lower().replace("-", "").replace("_", ""): str(value) for key, value in known.items()}
        version = json.dumps({key: value for key, value in sorted(named.items()) if key in _VERSION})
        return hashlib.sha256(version.encode()).hexdigest()[:16], known.get("size")

    def _download(self, path: str, check_size: Callable[[int], None], limit: int | None) -> str:
        version, size = self._ask()
        if size is not None:
            check_size(size)

        def count(arrived: int) -> None:
            if size is not None and arrived > size:
                raise ConnectionError(f"more bytes arrive than the {size:,} that the server told")
            if size is None and limit is not None and arrived > limit:
                check_size(arrived)

        arrival = _arrival(count, self._least_rate, self._timeout_seconds)
        self._run("get_file", self._path, path, callback=arrival)
        found, size = os.path.getsize(path), arrival.size if size is None else size
        if size is None:
            before, self._last_size = self._last_size, found
            # Its end looks like a broken connection (RFC 9112, 6.3), so an empty file is never accepted.
            if found != before or not found:
                tries = f"{found:,} bytes arrived" if before < 0 else f"{before:,} bytes arrived, then {found:,}"
                raise ConnectionError(f"{tries}, and the server gives no size")
        elif found != size:
            raise ConnectionError(f"{found:,} bytes arrived, and the server has {size:,}")
        if found > _ONE_REQUEST_BYTES and self._ask()[0] != version:
            raise ConnectionError("it changed while it was fetched")
        return version

    def _run(self, name: str, *args: Any, **options: Any) -> None:
        """Call a method of the file system that copies a file; after an interrupt, it no longer runs.

        fsspec itself only stops waiting for it. It would go on in fsspec's thread, and create again the local file
        that was deleted, or write to the one of the next try.
        """
        system, ended = self._file_system, threading.Event()
        if not system.async_impl:
            getattr(system, name)(*args, **options)
            return

        async def run() -> None:
            try:
                await getattr(system, f"_{name}")(*args, **options)
            finally:
                ended.set()

        running = asyncio.run_coroutine_threadsafe(run(), system.loop)
        try:
            while not ended.wait(1.0):  # Ctrl-C that comes just before a wait is only handled after it
                pass
            running.result()
        except BaseException:
            if running.cancel():
                ended.wait(_CANCEL_SECONDS)
            raise

    def _tried(self, action: Callable[[], Any], done: str = "fetched") -> Any:
        began = time.monotonic()
        for tries, wait in enumerate((*_WAIT_SECONDS, None), 1):
            try:
                return action()
            except (SizeError, IsADirectoryError):
                raise
            except Exception as error:
                if (known := final_error(self._url, error)) is not None:
                    raise known from error
                timed_out = any(isinstance(link, (TimeoutError, asyncio.TimeoutError)) for link in _chain(error))
                if wait is None or timed_out:  # after a timeout, do not wait again
                    what = f"{shown(self._url)} could not be {done} ({tries} tries in {time.monotonic() - began:.1f} s)"
                    raise UnreachableError(f"{what}: {text_of(error)}; check address and network") from error
            time.sleep(wait)
        raise AssertionError("the last try returns or raises")


def _arrival(count: Callable[[int], None], least_rate: float, seconds: float) -> Any:
    """Return a callback for fsspec that counts arriving bytes, and raises if they are too many or too slow."""
    from fsspec.callbacks import Callback

    class Arrival(Callback):  # type: ignore[misc]
        """Callback that the file system calls after each piece it wrote."""

        def __init__(self) -> None:
            super().__init__()
            self._since, self._before = time.monotonic(), 0

        def absolute_update(self, value: int) -> None:
            self.relative_update(value - self.value)

        def relative_update(self, inc: int = 1) -> None:
            self.value += inc
            count(self.value)
            now = time.monotonic()
            if (passed := now - self._since) >= seconds:
                arrived = self.value - self._before
                if arrived < least_rate * passed:
                    what = f"{arrived:,} bytes arrived in {passed:.1f} s"
                    raise ConnectionError(f"{what}, and min_bytes_per_second is {least_rate:,.0f}")
                self._since, self._before = now, self.value

    return Arrival()


def _hold(file_system: Any) -> None:
    while file_system is not None:
        if file_system.async_impl:
            _held[id(file_system)] = file_system
        below = getattr(getattr(file_system, "of", None), "fs", None)  # of an archive; of a cache or a folder:
        file_system = below if below is not None else getattr(file_system, "fs", None)


#: Headers that a request to another host than the named one may have.
_HEADERS_FOR_ALL = {"accept", "accept-encoding", "accept-language", "range", "user-agent", "if-match", "if-range"}


@functools.cache
def _same_host_only() -> Any:
    """Return an aiohttp trace that removes the user's headers when a server redirects to another host.

    It is one object for all, because fsspec has one client for equal options.
    """
    from aiohttp import TraceConfig

    async def leave_out(_session: Any, _context: Any, redirect: Any) -> None:
        place = redirect.response.headers.get("Location") or redirect.response.headers.get("URI") or ""
        if urljoin(str(redirect.url), place).split("/")[:3] != str(redirect.url).split("/")[:3]:
            for name in [name for name in redirect.headers if name.lower() not in _HEADERS_FOR_ALL]:
                redirect.headers.popall(name, None)

    trace = TraceConfig()
    trace.on_request_redirect.append(leave_out)
    return trace


def _options(protocol: str, given: Mapping[str, Any], timeout_seconds: float) -> dict[str, Any]:
    if protocol in _HTTP:
        from aiohttp import ClientTimeout

        # no limit on the total time, which is five minutes by default, because files may be large
        limits = dict.fromkeys(("connect", "sock_connect", "sock_read"), timeout_seconds)
        client: dict[str, Any] = {"timeout": ClientTimeout(total=None, **limits), "auto_decompress": False}
        client |= given.get("client_kwargs", {})
        client["trace_configs"] = [_same_host_only(), *client.get("trace_configs", ())]
        headers = {"Accept-Encoding": "identity", **given.get("headers", {})}
        return {**given, "client_kwargs": client, "headers": headers}
    if protocol in _S3:
        config: dict[str, Any] = {"connect_timeout": timeout_seconds, "read_timeout": timeout_seconds}
        config |= {"retries": {"total_max_attempts": 1}}
        return {**given, "config_kwargs": {**config, **given.get("config_kwargs", {})}}
    if protocol in _GCS:
        return {"use_listings_cache": False, **given}  # makes fsspec create a client of our own
    return dict(given)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def final_error(url: str, error: Exception) -> Exception | None:
    """Return the builtin error to raise, or None if another try may help."""
    chain, url = list(_chain(error)), shown(url)
    statuses = [getattr(link, "status", None) for link in chain]
    status = next((status for status in statuses if isinstance(status, int)), None)
    if any(isinstance(link, OSError) and link.errno in _OURS and link.filename for link in chain) or (
        isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    ):
        what = f"{url} could not be stored: {text_of(error)}; make room, or set STREAM_DATALOADER_CACHE"
        return OSError(getattr(error, "errno", None), what)
    found = f"the server answered {status}" if status is not None else text_of(error)
    if status in (401, 403, 407) or isinstance(error, PermissionError):
        return PermissionError(f"{url} may not be accessed: {found}; check the credentials in storage_options")
    by_network = status is None and any(map(_is_of_the_network, chain))
    if status in (404, 410) or (status is None and not by_network and isinstance(error, FileNotFoundError)):
        return FileNotFoundError(f"{url} is not there: {found}; check the address")
    if status is not None and status < 500 and status not in _SERVER_IS_BUSY:
        return OSError(f"{url} cannot be read: {found}; check the address")
    if status is not None or by_network or isinstance(error, OSError):
        return None
    return ValueError(f"{url} cannot be read: {found}; check the address and the storage options")


def _is_of_the_network(error: BaseException) -> bool:
    if isinstance(error, (ConnectionError, TimeoutError, asyncio.TimeoutError, EOFError)):
        return True
    if (aiohttp := sys.modules.get("aiohttp")) and isinstance(error, aiohttp.ClientError):
        return not isinstance(error, aiohttp.InvalidURL)
    botocore = sys.modules.get("botocore.exceptions")
    return bool(botocore) and isinstance(error, (botocore.HTTPClientError, botocore.ConnectionError))  # type: ignore[union-attr]


def text_of(error: Exception) -> str:
    """Return the first cause of an error, in one line."""
    root = list(_chain(error))[-1]
    text = shown(" ".join(str(root).split()))
    return f"{type(root).__name__}: {text}" if text else type(root).__name__
