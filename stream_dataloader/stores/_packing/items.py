"""One stream's time steps, as a packer takes them: opened, cut out of windows, transformed, counted.

Guarantee: an error of the stream or of the transform is kept, so that it can be told from one of the store, and says at
which step it happened.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from stream_dataloader._items.layout import Layout
from stream_dataloader._items.structure import Misfit, flatten
from stream_dataloader.errors import (
    ItemError,
    LengthError,
    OpenError,
    ReadError,
    StoreError,
    StreamError,
    shorten,
)
from stream_dataloader.stream_info import get_stream_info

__all__ = ["Items"]

_END = object()


class Items(Iterator[Any]):
    """The time steps of the stream that the loader has opened here; a context, which closes the stream.

    Args:
        source: What it is opened from.
        open_stream: Opens it.
        transform: Applied to each time step; None: they are packed as they are.
        windowed: The stream yields windows of several steps.
        length: How many steps it has to have; negative if nobody said.

    Attributes:
        steps: How many were read.
        step_bytes: What one takes, about.
    """

    def __init__(
        self,
        source: Any,
        open_stream: Callable[[Any], Any],
        transform: Callable[[Any], Any] | None,
        *,
        windowed: bool,
        length: int,
    ) -> None:
        self._source = source
        self._open_stream = open_stream
        self._transform = transform
        self._windowed = windowed
        self._length = length
        self._info = get_stream_info()
        self._opened: Any = None
        self._iterator: Any = None
        self._rest: Iterator[Any] = iter(())
        self._error: StreamError | None = None
        self.steps = self.step_bytes = 0

    def __enter__(self) -> Items:
        return self

    def __exit__(self, *_: object) -> None:
        iterator, opened = self._iterator, self._opened
        for closable in (iterator,) if iterator is opened else (iterator, opened):
            if callable(close := getattr(closable, "close", None)):
                try:
                    close()
                except Exception as error:
                    told = f"closing the stream of source {self._info.source_index} ({shorten(self._source)}) raised"
                    warnings.warn(f"{told} {shorten(error)}", RuntimeWarning, stacklevel=2)

    def __next__(self) -> Any:
        item = self._next()
        if item is _END:
            self._check_length()
            raise StopIteration
        if self._transform is not None:
            try:
                item = self._transform(item)
            except Exception as error:
                raise self._failed(ReadError, f"transform raised {shorten(error, 2000)}") from error
        if not self.steps:
            self.step_bytes = _bytes_of(item)
        self.steps += 1
        return item

    @property
    def reads_into(self) -> bool:
        """Whether the steps behind the first can be had by `read_into`, as of a stream that is read by a loader."""
        return self._transform is None and not self._windowed and callable(getattr(self._opened, "read_into", None))

    def read_into(self, out: Any, most: int) -> int:
        """See `protocols.ReadsInto`; `most` is for how many steps there is room."""
        try:
            count = self._opened.read_into(out)
        except Exception as error:
            raise self._failed(ReadError, f"the stream's read_into raised {shorten(error, 2000)}") from error
        if not isinstance(count, int) or not 0 <= count <= most:
            raise self._failed(
                ItemError, f"the stream's read_into returned {shorten(count)}; return a number from 0 to {most}"
            )
        if not count:
            self._check_length()
        self.steps += count
        return count

    def _check_length(self) -> None:
        if self._length >= 0 and self._length != self.steps:
            told = f"the stream has {self.steps} steps, and lengths says {self._length}; correct lengths="
            raise self._failed(LengthError, told)

    def _next(self) -> Any:
        """The next step, or `_END`."""
        if (step := next(self._rest, _END)) is not _END:
            return step
        if self._iterator is None:
            self._open()
        while True:
            try:
                item = next(self._iterator, _END)
            except Exception as error:
                raise self._failed(ReadError, f"the stream raised {shorten(error, 2000)}") from error
            if item is _END or not self._windowed:
                return item
            try:
                self._rest = _steps_of(item)
            except Misfit as error:
                raise self._failed(ItemError, str(error)) from None
            if (step := next(self._rest, _END)) is not _END:
                return step

    def _open(self) -> None:
        try:
            self._opened = self._open_stream(self._source)
        except Exception as error:
            raise self._failed(OpenError, f"open_stream raised {shorten(error, 2000)}") from error
        try:
            self._iterator = iter(self._opened)
        except Exception as error:
            what = f"open_stream returned {shorten(self._opened, 80)}, a {type(self._opened).__name__}"
            raise self._failed(OpenError, f"{what}, which cannot be iterated over ({error}); yield items") from error

    def failure(self, error: Exception) -> StreamError | None:
        """What to tell of an error that packing the stream raised; None if the stream is not to blame."""
        if self._error is not None:
            return self._error
        if isinstance(error, (ValueError, TypeError)) and not isinstance(error, StoreError):
            failure = self._failed(ItemError, str(error), handed_out=True)
            failure.__cause__ = error
            return failure
        return None

    def _failed(self, kind: type[StreamError], what: str, *, handed_out: bool = False) -> StreamError:
        number, source = self._info.source_index, shorten(self._source)
        step = max(self.steps - handed_out, 0)
        self._error = kind(
            f"source {number} ({source}), step {step}: {what}",
            source_index=number,
            source=source,
            position=step,
            lane=self._info.lane,
            worker_id=self._info.worker_id,
        )
        return self._error


def _steps_of(window: Any) -> Iterator[Any]:
    """The time steps of a window; a leaf without a time axis is in each of them."""
    layout, _ = Layout.of(window, windowed=True)
    leaves = flatten(window)[1]
    count = layout.window_length(leaves)
    timed = [spec.timed for spec in layout.specs]
    return (
        layout.build([leaf[step] if each else leaf for leaf, each in zip(leaves, timed, strict=True)])
        for step in range(count)
    )


def _bytes_of(item: Any) -> int:
    """What a time step's leaves take, about."""
    return sum(
        int(getattr(leaf, "nbytes", 0)) or (len(leaf) if isinstance(leaf, (str, bytes)) else 8)
        for leaf in flatten(item)[1]
    )
