"""One file on a server, seen through fsspec: what it is now, and its bytes.

Guarantee: a process has one client for a server and the options for it, which fsspec keeps with its connections. A file
takes one request, over a kept connection. The answer that carries the bytes identifies their version, so they are never
taken for a newer one. A failure is a builtin error that names the URL (`remote_errors`); one that may pass is tried
again, a few times within two seconds.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

from stream_dataloader.streams.cache.remote_errors import final_error, text_of, timed_out

__all__ = ["RemoteFile", "SizeError", "UnreachableError", "remote_file"]

_WAIT_SECONDS = (0.2, 0.5, 1.0)  # before each further try

_HTTP, _S3, _GCS = ("http", "https"), ("s3", "s3a"), ("gs", "gcs")

#: Fields of answers that differ between versions of a file, in lower case and without - and _.
_VERSION = {
    *("etag", "lastmodified", "mtime", "modified", "modify", "updated", "created", "datetime", "generation"),
    *("versionid", "checksum", "crc", "crc32c", "md5", "md5hash", "contentmd5", "digest", "size"),
}

#: The clients that were used. fsspec keeps them too, but lets go of them in a forked process, where the end of a client
#: would end its parent's connections: both have the one epoll.
_held: dict[int, Any] = {}

Result = TypeVar("Result")


class UnreachableError(ConnectionError):
    """The server did not answer, or the connection broke off: nothing is known about the file."""


class SizeError(ValueError):
    """The file has another size than is wanted."""


class _Answers:
    """The headers of a server's answers, of HTTP and S3; fsspec does not hand them on."""

    def __init__(self) -> None:
        self.versions: list[str] = []
        self.failed = False
        #: Nothing marks the last one's end but that the connection closes, as it also does when it breaks off
        #: (RFC 9112, 6.3).
        self.ends_anywhere = False

    def note(self, headers: Mapping[str, Any], *, failed: bool) -> None:
        self.failed = failed
        if not failed:
            self.versions.append(_version_of(headers))


#: Of the task that asks.
_answers: ContextVar[_Answers | None] = ContextVar("_answers", default=None)


def _version_of(headers: Mapping[str, Any]) -> str:
    """A different one whenever the file has changed."""
    named = {key.lower().replace("-", "").replace("_", ""): str(value) for key, value in headers.items()}
    version = {key: value for key, value in sorted(named.items()) if key in _VERSION}
    version = version or {"size": named.get("contentlength", "")}
    return hashlib.sha256(json.dumps(version).encode()).hexdigest()[:16]


@functools.cache
def _http_trace() -> Any:
    """Has aiohttp report each answer; one object, as fsspec compares the options of clients."""
    from aiohttp import TraceConfig

    async def note(_session: Any, _context: Any, ended: Any) -> None:
        if (answers := _answers.get()) is not None:
            headers = ended.response.headers
            chunked = "chunked" in headers.get("Transfer-Encoding", "").lower()
            answers.ends_anywhere = not chunked and "Content-Length" not in headers
            answers.note(headers, failed=ended.response.status >= 400)

    trace = TraceConfig()
    trace.on_request_end.append(note)
    return trace


def _note_s3(parsed: Mapping[str, Any], **_: Any) -> None:
    if (answers := _answers.get()) is not None:
        answers.note(parsed, failed="Error" in parsed)


async def _listen_to_s3(file_system: Any, path: str) -> None:
    """Have botocore report each answer."""
    await file_system.set_session()
    client = await file_system.get_s3(file_system.split_path(path)[0])
    for operation in ("GetObject", "HeadObject"):
        event = f"after-call.s3.{operation}"
        client.meta.events.register(event, _note_s3, unique_id=f"stream_dataloader.{event}")


class RemoteFile:
    """One file on a server; every failure is a builtin error that names it, `UnreachableError` if nothing is known."""

    def __init__(self, url: str, protocol: str, file_system: Any, path: str, timeout_seconds: float) -> None:
        self._url = url
        self._file_system = file_system
        self._path = path
        self._timeout_seconds = timeout_seconds
        self._is_s3 = protocol in _S3
        self._tells_with_bytes = protocol in (*_HTTP, *_S3)
        self._last_size = -1  # bytes that the try before got, if the server gives no size

    def info(self) -> str:
        """Ask the server which version of the file it has."""
        answers = _Answers()
        known = self._tried(lambda: self._ask(answers))
        if known.get("type") == "directory":
            raise IsADirectoryError(f"{self._url} is a directory; give the files in it")
        return answers.versions[-1] if answers.versions else _version_of(known)

    def fetch(self, path: str, check_size: Callable[[int], None]) -> str:
        """Write the file's bytes to a local one; returns their version, as `info` does.

        `check_size` is called with the number of bytes before they come, if the server gives it.
        """
        asked = None if self._tells_with_bytes else self.info()
        found = self._tried(lambda: self._download(path, check_size))
        return asked or found

    def _ask(self, answers: _Answers) -> dict[str, Any]:
        if not self._file_system.async_impl:
            return dict(self._file_system.info(self._path))

        def ask() -> Coroutine[Any, Any, Any]:
            return asyncio.wait_for(self._file_system._info(self._path), self._timeout_seconds)

        return dict(self._run(ask, answers))

    def _download(self, path: str, check_size: Callable[[int], None]) -> str:
        """Fetch the bytes; returns their version, if the answer has it."""
        from fsspec.callbacks import Callback

        answers = _Answers()

        class Arrival(Callback):  # type: ignore[misc]
            def set_size(self, size: int | None) -> None:
                super().set_size(size)
                if size is not None and not answers.failed:
                    check_size(size)

        arrival = Arrival()
        if self._file_system.async_impl:
            self._run(lambda: self._file_system._get_file(self._path, path, callback=arrival), answers)
        else:
            self._file_system.get_file(self._path, path, callback=arrival)
        found = os.path.getsize(path)
        if arrival.size is not None and found != arrival.size:
            raise ConnectionError(f"{found:,} bytes arrived, and the server has {arrival.size:,}")
        if arrival.size is None and answers.ends_anywhere:
            before, self._last_size = self._last_size, found
            # The end of such an answer looks like a connection that broke off. Two tries of one size are believed.
            if found != before:
                tries = f"{found:,} bytes arrived" if before < 0 else f"{before:,} bytes arrived, then {found:,}"
                raise ConnectionError(f"{tries}, and the server gives no size")
        if len(set(answers.versions)) > 1:  # large files come in several pieces
            raise ConnectionError("it changed while it was fetched")
        return answers.versions[0] if answers.versions else "unknown"  # which is no version: fetched again

    def _run(self, action: Callable[[], Coroutine[Any, Any, Result]], answers: _Answers) -> Result:
        """Wait for what the client does; an interrupt (Ctrl-C in the middle of a download) ends it too."""
        loop = self._file_system.loop
        tasks: list[Any] = []

        async def run() -> Result:
            tasks.append(asyncio.current_task())
            _answers.set(answers)
            if self._is_s3:
                await _listen_to_s3(self._file_system, self._path)
            return await action()

        async def end() -> None:
            tasks[0].cancel()
            await asyncio.wait(tasks)

        future = asyncio.run_coroutine_threadsafe(run(), loop)
        try:
            return future.result()
        except BaseException:
            if not future.done():  # it is this thread that was interrupted
                asyncio.run_coroutine_threadsafe(end(), loop).result()
            raise

    def _tried(self, action: Callable[[], Result]) -> Result:
        """What an action returns, with more tries where they may help."""
        began = time.monotonic()
        for tries, wait in enumerate((*_WAIT_SECONDS, None), 1):
            try:
                return action()
            except SizeError:
                raise
            except Exception as error:
                if (known := final_error(self._url, error)) is not None:
                    raise known from error
                if wait is None or timed_out(error):  # a timeout is wait enough
                    raise UnreachableError(
                        f"{self._url} could not be fetched ({tries} tries in {time.monotonic() - began:.1f} s): "
                        f"{text_of(error)}; check the address, the network and the server"
                    ) from error
            time.sleep(wait)
        raise AssertionError("the last try returns or raises")


def remote_file(url: str, storage_options: Mapping[str, Mapping[str, Any]], timeout_seconds: float) -> RemoteFile:
    """A file of any protocol that fsspec knows, or of a chain of them."""
    options: dict[str, dict[str, Any]] = {}
    try:
        from fsspec import get_filesystem_class
        from fsspec.core import split_protocol, url_to_fs

        for link in url.split("::"):
            protocol = split_protocol(link)[0] or link
            options[protocol] = _options(protocol, storage_options.get(protocol, {}), timeout_seconds)
            if not get_filesystem_class(protocol).async_impl:  # a client of that kind serves one thread
                options[protocol] |= {"skip_instance_cache": True}
        file_system, path = url_to_fs(url, **options)
    except ImportError as error:
        raise ImportError(
            f"reading {url} needs a package that is not installed: {error} (pip install 'stream-dataloader[fsspec]' "
            "brings fsspec, and what http:// needs; s3:// needs s3fs, gs:// gcsfs, abfs:// adlfs)"
        ) from error
    except Exception as error:
        if (known := final_error(url, error)) is None:
            raise UnreachableError(f"{url} could not be opened: {text_of(error)}; check the address") from error
        raise known from error
    if hasattr(file_system, "retries"):
        file_system.retries = 1  # s3fs and gcsfs would multiply their own with ours
    _hold(file_system)
    return RemoteFile(url, split_protocol(url)[0] or "", file_system, path, timeout_seconds)


def _hold(file_system: Any) -> None:
    """Keep a file system, and those it is built upon, if they are clients."""
    while file_system is not None:
        if file_system.async_impl:
            _held[id(file_system)] = file_system
        below = getattr(getattr(file_system, "of", None), "fs", None)  # of an archive; of a cache or a folder:
        file_system = below if below is not None else getattr(file_system, "fs", None)


def _options(protocol: str, given: Mapping[str, Any], timeout_seconds: float) -> dict[str, Any]:
    """A file system's options: those given, and else what makes it fail in good time, and fetch bytes as they are."""
    if protocol in _HTTP:
        from aiohttp import ClientTimeout

        # no limit to the whole, which is five minutes by default: files may be large
        timeout = ClientTimeout(
            total=None, connect=timeout_seconds, sock_connect=timeout_seconds, sock_read=timeout_seconds
        )
        client = {"timeout": timeout, "auto_decompress": False, **given.get("client_kwargs", {})}
        client["trace_configs"] = [*(client.get("trace_configs") or ()), _http_trace()]
        headers = {"Accept-Encoding": "identity", **given.get("headers", {})}
        return {**given, "client_kwargs": client, "headers": headers}
    if protocol in _S3:
        config: dict[str, Any] = {"connect_timeout": timeout_seconds, "read_timeout": timeout_seconds}
        config |= {"retries": {"total_max_attempts": 1}}
        return {**given, "config_kwargs": {**config, **given.get("config_kwargs", {})}}
    if protocol in _GCS:
        return {"use_listings_cache": False, **given}  # a client that differs from the user's own, whose retries stay
    return dict(given)
