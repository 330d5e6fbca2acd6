"""One stream's time steps, as a packer takes them: opened, cut out of windows, transformed, counted.

Guarantee: an error of the stream or of the transform is kept, so that it can be told from one of the store, and says at
which step it happened.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
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


class Items(Iterable[Any]):
    """The time steps of the stream that the loader has opened here, to be iterated over once.

    Args:
        source: What it is opened from.
        open_stream: Opens it.
        transform: Applied to each time step; None: they are packed as they are.
        windowed: The stream yields windows of several steps.
        length: How many steps it has to have; negative if nobody said.

    Attributes:
        steps: How many were read.
        bytes: What they take, about.
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
        self._opened: Any = None
        self._iterator: Any = None
        self._first: Any = ()
        self._error: StreamError | None = None
        self.steps = 0

    def __iter__(self) -> Iterator[Any]:
        try:
            self._opened = self._open_stream(self._source)
        except Exception as error:
            raise self._failed(OpenError, f"open_stream raised {shorten(error, 2000)}") from error
        try:
            self._iterator = iter(self._opened)
        except Exception as error:
            what = f"open_stream returned {shorten(self._opened, 80)}, a {type(self._opened).__name__}"
            raise self._failed(OpenError, f"{what}, which cannot be iterated over ({error}); yield items") from error
        for item in self._steps_of_windows() if self._windowed else self._yielded():
            step = item if self._transform is None else self._transformed(item)
            if not self.steps:
                self._first = step
            self.steps += 1
            yield step
        self._check_length()

    def _transformed(self, item: Any) -> Any:
        assert self._transform is not None
        try:
            return self._transform(item)
        except Exception as error:
            raise self._failed(ReadError, f"transform raised {shorten(error, 2000)}") from error

    def _yielded(self) -> Iterator[Any]:
        """What the stream yields."""
        try:
            for item in self._iterator:  # noqa: UP028  # `yield from` would close it, where what that raises is lost
                yield item
        except Exception as error:
            raise self._failed(ReadError, f"the stream raised {shorten(error, 2000)}") from error

    def _steps_of_windows(self) -> Iterator[Any]:
        """The time steps of its windows; a leaf without a time axis is in each of them."""
        for window in self._yielded():
            try:
                layout, _ = Layout.of(window, windowed=True)
                leaves = flatten(window)[1]
                count = layout.window_length(leaves)
            except Misfit as error:
                raise self._failed(ItemError, str(error)) from None
            pairs = [(leaf, spec.timed) for leaf, spec in zip(leaves, layout.specs, strict=True)]
            for step in range(count):
                yield layout.build([leaf[step] if timed else leaf for leaf, timed in pairs])

    @property
    def bytes(self) -> int:
        leaves = flatten(self._first)[1]
        sizes = (getattr(leaf, "nbytes", 0) or (len(leaf) if isinstance(leaf, (str, bytes)) else 8) for leaf in leaves)
        return self.steps * int(sum(sizes))

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
        self.steps += count
        if not count:
            self._check_length()
        return count

    def _check_length(self) -> None:
        if self._length >= 0 and self._length != self.steps:
            what = f"the stream has {self.steps} steps, and lengths says {self._length}; correct lengths="
            raise self._failed(LengthError, what)

    def close(self) -> None:
        """Close the stream."""
        iterator, opened = self._iterator, self._opened
        for closable in (iterator,) if iterator is opened else (iterator, opened):
            if callable(close := getattr(closable, "close", None)):
                try:
                    close()
                except Exception as error:
                    what = f"closing the stream of source {get_stream_info().source_index} ({shorten(self._source)})"
                    warnings.warn(f"{what} raised {shorten(error)}", RuntimeWarning, stacklevel=2)

    def failure(self, error: Exception) -> StreamError | None:
        """What to tell of an error that packing the stream raised; None if the stream is not to blame."""
        if self._error is None and isinstance(error, (ValueError, TypeError)) and not isinstance(error, StoreError):
            self.steps = max(self.steps - 1, 0)  # it was handed out
            self._failed(ItemError, str(error)).__cause__ = error
        return self._error

    def _failed(self, kind: type[StreamError], what: str) -> StreamError:
        info, source = get_stream_info(), shorten(self._source)
        self._error = kind(
            f"source {info.source_index} ({source}), step {self.steps}: {what}",
            source_index=info.source_index,
            source=source,
            position=self.steps,
            lane=info.lane,
            worker_id=info.worker_id,
        )
        return self._error
