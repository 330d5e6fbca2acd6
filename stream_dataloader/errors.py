"""Every error that the library raises while it runs; each is also a subclass of the nearest builtin error.

A wrong option of a dataset or loader raises a plain `ValueError` or `TypeError` in the constructor. Every constructor
works with the message alone, because torch's worker wrapper rebuilds exceptions that way.
"""

from __future__ import annotations

import pickle
import re
import traceback
from collections.abc import Sequence
from typing import Any

__all__ = [
    "DeviceError",
    "EmptySourcesError",
    "FailureLimitError",
    "GapError",
    "ItemError",
    "IteratorError",
    "LengthError",
    "NonFiniteStateError",
    "OpenError",
    "RankError",
    "ReadError",
    "StateError",
    "StoreError",
    "StreamDataLoaderError",
    "StreamError",
    "WorkerDeathError",
    "WorkerError",
    "WorkerTimeoutError",
]


#: A URL's user and password, and its query, which may hold a signature. In Azure's, a container stands at that place.
_CREDENTIALS = re.compile(r"\b(?!abfss?:|wasbs?:)([a-z][a-z0-9+.-]*://)[^\s/@?#'\"]*@", re.IGNORECASE)
_QUERY = re.compile(r"\b([a-z][a-z0-9+.-]*://[^\s?#'\"]*)\?[^\s#'\"]*", re.IGNORECASE)

#: Longest line of an error. A path may have 4,096 bytes; data may have names and values of megabytes.
_LONGEST_LINE = 12_000


def without_secrets(text: str) -> str:
    """Remove user, password and query from URLs in a text, for errors, logs and names of streams.

    Example:
        >>> without_secrets("https://me:secret@host/a.npy?signature=secret is not there")
        'https://host/a.npy?... is not there'
    """
    return _QUERY.sub(r"\1?...", _CREDENTIALS.sub(r"\1", text)) if "://" in text else text


def shown(text: object) -> str:
    r"""Return a text from data as one line for a terminal: with visible control characters, without secrets of URLs.

    Example:
        >>> print(shown("a\x1b[2K\nb.mp4"))
        a\x1b[2K\nb.mp4
    """
    return _visible(without_secrets(str(text)))


def _visible(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def shown_lines(text: str) -> str:
    """Return a text of several lines, each treated as in `shown`; the middle of very long lines is left out."""
    plain = without_secrets(text)
    if plain.isprintable() and len(plain) <= _LONGEST_LINE:
        return plain
    lines = map(_visible, plain.expandtabs().split("\n"))
    half = _LONGEST_LINE // 2
    return "\n".join(one if len(one) <= _LONGEST_LINE else f"{one[:half]} ... {one[-half:]}" for one in lines)


class StreamDataLoaderError(Exception):
    """Base of every error of this library; its message shows no secrets of URLs, and no control characters."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*(shown_lines(value) if isinstance(value, str) else value for value in args))


class StreamError(StreamDataLoaderError, RuntimeError):
    """One source could not be streamed.

    Attributes:
        source_index: Index into `sources`; -1 when unknown.
        source: `repr` of the source, shortened.
        position: Time step (or item, for streams that yield windows) within the stream; -1 before the first.
        lane: Row of the batch that read the source; -1 when unknown.
        worker_id: Worker that owned the lane; -1 when unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        source_index: int = -1,
        source: str = "",
        position: int = -1,
        lane: int = -1,
        worker_id: int = -1,
    ) -> None:
        super().__init__(message)
        self.source_index = source_index
        self.source = source
        self.position = position
        self.lane = lane
        self.worker_id = worker_id

    @property
    def place(self) -> dict[str, Any]:
        """All of these attributes, for another error about the same place."""
        names = ("source_index", "source", "position", "lane", "worker_id")
        return {name: getattr(self, name) for name in names}


class OpenError(StreamError):
    """The factory raised for a source, or did not return an iterable."""


class ReadError(StreamError):
    """A stream raised an exception while it was read."""


class GapError(StreamError):
    """A live stream broke and goes on from now: items may be missing before `position`. It is recorded, not raised."""


class ItemError(StreamError, ValueError):
    """An item differs in structure, dtype or shape from the other items of the batch or the stream."""


class LengthError(StreamError, ValueError):
    """A stream has more or fewer items than `lengths` promised."""


class EmptySourcesError(StreamError, ValueError):
    """A lane drew as many sources in a row as the list has, and none yielded an item."""


class FailureLimitError(StreamError):
    """More sources were skipped than `max_failures` allows; the message names the last one."""


class WorkerError(StreamDataLoaderError, RuntimeError):
    """A worker died, or ended before its lanes were finished."""


class WorkerDeathError(WorkerError):
    """A worker process died, or a worker thread was ended.

    Attributes:
        suspects: Pairs of a source that the worker was reading and the logical time; -1 for one that it was opening.
        member: The member of `side_by_side` that it read for; 0 for other loaders.
    """

    def __init__(self, message: str, suspects: frozenset[tuple[int, int]] = frozenset()) -> None:
        super().__init__(message)
        self.suspects = suspects
        self.member = 0


class WorkerTimeoutError(WorkerError, TimeoutError):
    """No worker delivered within `timeout` seconds. As a `TimeoutError` it is an `OSError`, too."""


class RankError(StreamDataLoaderError, RuntimeError):
    """Ranks are about to read different data, or one of them left, died or is stuck.

    Attributes:
        ranks: The ranks concerned, if they are known.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class DeviceError(StreamDataLoaderError, RuntimeError):
    """The requested device cannot decode a video: it does not exist, or its decoder does not support the video.

    Attributes:
        device: The device, as requested.
        codec: FFmpeg's name of the decoder that the video needs; empty when unknown.
    """

    def __init__(self, message: str, *, device: str = "", codec: str = "") -> None:
        super().__init__(message)
        self.device = device
        self.codec = codec


class RemoteTraceback(Exception):
    """The cause of an exception that comes from another process: shows its traceback there."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


class StateError(StreamDataLoaderError, ValueError):
    """A state cannot be used: it belongs to other sources or options, to another batch, or is not a state at all."""


class StoreError(StreamDataLoaderError, ValueError):
    """A store is damaged, unfinished, was replaced while it was read, or lacks the requested content."""


class NonFiniteStateError(StreamDataLoaderError, FloatingPointError):
    """A lane goes on with a carried state that contains NaN or infinity, which would never disappear by itself.

    This is not a `StreamError`: the model computed the state, and the source may be correct.

    Attributes:
        source_index: Index into `sources`; -1 when unknown.
        position: Time step within the stream; -1 when unknown.
        lane: Row of the batch that would go on; -1 when unknown.
    """

    def __init__(self, message: str, *, source_index: int = -1, position: int = -1, lane: int = -1) -> None:
        super().__init__(message)
        self.source_index, self.position, self.lane = source_index, position, lane


class IteratorError(StreamDataLoaderError, RuntimeError):
    """An iterator was used after an error had ended it, after a newer one had begun, or in a process forked since."""


def format_traceback(error: BaseException) -> str:
    """Return the full traceback text of `error`, including causes, treated by `shown_lines`."""
    try:
        lines = traceback.format_exception(type(error), error, error.__traceback__)
    except Exception as broken:  # `traceback` cannot format an exception whose attributes or causes raise
        why = f"{type(error).__name__}, whose text raised {type(broken).__name__}\n"
        lines = ["Traceback (most recent call last):\n", *traceback.format_tb(error.__traceback__), why]
    return shown_lines("".join(lines))


def shorten(value: object, limit: int = 200) -> str:
    """Return `repr(value)` in one line, cut in the middle to at most `limit` characters; never raise."""
    try:
        text = " ".join(repr(value).split("\n"))  # arrays have several lines, which would tear a message apart
    except Exception as error:  # a user's broken __repr__ must not hide the error being reported
        text = f"<{type(value).__name__} whose repr raised {type(error).__name__}>"
    text = without_secrets(text)
    half = (limit - 5) // 2
    return text if len(text) <= limit else f"{text[:half]} ... {text[-half:]}"


def can_be_sent(error: BaseException | None) -> bool:
    """Return whether another process can unpickle an exception, such as one of the user's own."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True


class ErrorReport:
    """An exception on its way to another process, with the cause and traceback that pickle would lose."""

    def __init__(self, error: Exception) -> None:
        self._error, self._text = error, format_traceback(error)
        self._cause = error.__cause__ if can_be_sent(error.__cause__) else None  # otherwise, only its text is kept

    def unpack(self) -> Exception:
        """Return the exception, with the cause that it had in the process it comes from."""
        remote = RemoteTraceback(self._text)
        if self._cause is not None:
            self._cause.__cause__ = remote
        self._error.__cause__ = self._cause or remote
        return self._error


def detached(error: Exception) -> Exception:
    """Return `error` without the frames that it came through, and the objects they hold, to raise it later.

    The last of its causes shows the frames as text, as for an error that comes from another process.
    """
    report, left = ErrorReport(error), [error, error.__cause__, error.__context__]
    seen: set[int] = set()  # causes may form a cycle
    while left:
        if (one := left.pop()) is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            left += [one.__cause__, one.__context__]
    return report.unpack()
