"""Batches on the way to an accelerator: page-locked memory, and copies ahead of use.

Guarantees: what the user gets is on the current stream as if it had been made there. An error of copying is raised in
place of its batch. Six batches lie on the device, but for those that users hold.

::

    host             next k: begins copy k+1, hands out k    |  next k+1: begins copy k+2, hands out k+1
    copy stream      copy k        copy k+1                  |       copy k+2
    current stream   ... k-1 ...   waits for copy k, then k  |  waits for copy k+1, then k+1

- The current stream waits for the copy's event.
- Memory on the device is allocated while the copy stream is current, so torch hands it out again only to that stream,
  and, by `record_stream`, behind what the current stream does with it.
- A copy from page-locked memory returns immediately. The host waits, asleep, where two copies are under way, or where
  it is three batches ahead.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from stream_dataloader._items.layout import is_dense
from stream_dataloader._kept_fields import map_leaves
from stream_dataloader._memory import copies
from stream_dataloader.batch import StreamBatch

if TYPE_CHECKING:
    from typing_extensions import Self


def device_of(name: Any) -> torch.device:
    """The device of a name or number."""
    if isinstance(name, torch.device):
        return name
    if isinstance(name, bool) or not isinstance(name, (str, int)):
        raise TypeError(f"device must be a torch.device, a name or a number, and is {name!r}, a {type(name).__name__}")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device is {name!r}, which torch does not know: {str(error).splitlines()[0]}") from None


def pinned(leaf: Any) -> Any:
    """A leaf in page-locked memory; what lies in such memory already, without gaps, stays where it is."""
    if not isinstance(leaf, torch.Tensor):
        return leaf.pin_memory() if hasattr(leaf, "pin_memory") else leaf
    if leaf.device.type != "cpu" or not is_dense(leaf):
        return leaf
    if not leaf.is_contiguous():  # one worker's lanes, say
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu", pin_memory=True).copy_(leaf)
    return leaf if leaf.is_pinned() else leaf.pin_memory()


def _there(batch: Any, move: Callable[[Any], Any]) -> Any:
    """`batch` with its leaves moved. A `StreamBatch` keeps its bookkeeping in host memory, too."""
    there = map_leaves(batch, move)
    return there._moved_from(batch) if isinstance(batch, StreamBatch) else there


def _moved_leaf(leaf: Any, device: torch.device) -> Any:
    return leaf.to(device) if hasattr(leaf, "to") else leaf


class Destination:
    """The last touch on the way to the user: page-locked memory, and a device that is not one of CUDA."""

    def __init__(self, device: Any, pin_memory: bool) -> None:
        self.device = None if device is None else device_of(device)
        self._pin_memory = pin_memory

    def __call__(self, batch: Any) -> Any:
        """The batch there; on CUDA, `OneAhead` takes it there."""
        on_cuda = self.device is not None and self.device.type == "cuda"
        if self._pin_memory or on_cuda:
            if torch.cuda.is_available():
                with torch.cuda.device(self.device if on_cuda else None):  # whose context it is allocated in
                    batch = map_leaves(batch, pinned)
            elif self._pin_memory:
                warnings.warn("pin_memory=True has no effect: no CUDA device is available", stacklevel=4)
        device = self.device
        return batch if device is None or on_cuda else _there(batch, lambda leaf: _moved_leaf(leaf, device))


class HasDestination:
    """A loader that moves its batches."""

    _destination: Destination

    @property
    def device(self) -> torch.device | None:
        """Where batches are moved to; None: they stay in host memory."""
        return self._destination.device

    def to(self, device: torch.device | str | int) -> Self:
        """Move batches to `device` from now on; returns the loader."""
        self._destination.device = device_of(device)
        return self

    def cuda(self, device: torch.device | str | int = "cuda") -> Self:
        """`to` the CUDA device."""
        return self.to(device)

    def cpu(self) -> Self:
        """`to` the CPU."""
        return self.to("cpu")


_MOST_COPIES = 2  # under way at once: the batch ahead, and the one before
_MOST_USES = 3  # batches that a host may be ahead of the device


_NOTHING = object()


class OneAhead:
    """Copies batches from host memory to a device on a stream of its own, one batch ahead of the one in use."""

    def __init__(
        self,
        batches: Iterator[Any],
        device: torch.device,
        hold: Callable[[bool, bool], None],  # is told what was fetched and not handed out yet: a batch, the end
        release: Callable[[], None] = lambda: None,  # on the copy stream, when a batch in host memory was let go of
        backend: Any = torch.cuda,
    ) -> None:
        self._batches, self._hold, self._release, self._backend = batches, hold, release, backend
        self._stream = _copy_stream(backend, backend.current_device() if device.index is None else device.index)
        self._device = self._stream.device
        self._fetched: Any = _NOTHING  # in host memory; its copy is still to begin
        self._end: Exception | None = None  # the end, or what was raised in place of a batch
        self._ahead: tuple[Any, Any] | None = None  # on the device but for what cannot be copied ahead; its event
        self._copies: deque[Any] = deque()  # the events behind the last copies
        self._uses: deque[Any] = deque()  # the events before the last uses

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._ahead is None:
            self._fetch()
            if self._end is not None:
                self._raise_end()
            self._hold(True, False)
            self._ahead = self._copy()  # raises in the batch's own place, and tries again when asked again
        batch = self._on_current_stream(*self._ahead)
        self._fetch()  # while the batch before is still being computed with
        following = None
        if self._end is None:
            with contextlib.suppress(Exception):  # of memory, say: raised in this batch's turn, if it fails then, too
                following = self._copy()
        self._ahead = following
        self._hold(self._end is None, self._end is not None)
        return batch

    def _fetch(self) -> None:
        """Have a batch to copy, or the end."""
        if self._fetched is not _NOTHING or self._end is not None:
            return
        try:
            self._fetched = next(self._batches)
        except StopIteration as end:
            self._end = end.with_traceback(None)  # it leads back here: who never asks for the end would leave a circle
        except Exception as error:
            self._end = error

    def _raise_end(self) -> None:
        error, self._end = self._end, None
        assert error is not None
        self._hold(False, False)
        try:
            raise error
        finally:
            del error  # its traceback leads here, and up to the loader: a circle would keep workers alive

    def _copy(self) -> tuple[Any, Any]:
        """Begin to copy what was fetched, and let go of it."""
        _wait_for_all_but(self._copies, _MOST_COPIES - 1)
        with self._backend.stream(self._stream):
            batch = _there(self._fetched, self._ahead_of_use)
            copied = self._backend.Event(blocking=True)
            copied.record(self._stream)
            self._fetched = _NOTHING
            self._release()  # here: its memory is free once what was begun on this stream is done
        self._copies.append(copied)
        return batch, copied

    def _ahead_of_use(self, leaf: Any) -> Any:
        return leaf.to(self._device, non_blocking=True) if _is_dense_on(leaf, "cpu") else leaf

    def _on_current_stream(self, batch: Any, copied: Any) -> Any:
        """What was copied, for use on the current stream."""
        _wait_for_all_but(self._uses, _MOST_USES - 1)
        current = self._backend.current_stream(self._device)
        current.wait_event(copied)
        begins = self._backend.Event(blocking=True)
        begins.record(current)
        self._uses.append(begins)

        def take(leaf: Any) -> Any:
            if not _is_dense_on(leaf, self._device.type):
                return _moved_leaf(leaf, self._device)
            leaf.record_stream(current)  # its memory is handed out again only behind what this stream does with it
            return leaf

        return _there(batch, take)


def _wait_for_all_but(events: deque[Any], count: int) -> None:
    """Wait until at most so many events are not passed: those that were recorded last."""
    while len(events) > count:
        if not events[0].query():
            events[0].synchronize()
        events.popleft()


def _is_dense_on(leaf: Any, kind: str) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type == kind and is_dense(leaf)


@functools.lru_cache(maxsize=64)
def _copy_stream(backend: Any, number: int) -> Any:
    """The stream that copies to a device; one for all loaders and epochs, as memory goes back to its stream."""
    stream = backend.Stream(torch.device("cuda", number))
    copies.streams.add(stream)
    return stream
