"""Transfer of batches to an accelerator: page-locked memory, and copies ahead of use.

Guarantees: the user can use a batch on the current stream as if it had been made there. An error of copying is raised
in place of its batch. At most six batches are on the device, besides those that users hold.

::

    host             next k: begins copy k+1, hands out k    |  next k+1: begins copy k+2, hands out k+1
    copy stream      copy k        copy k+1                  |       copy k+2
    current stream   ... k-1 ...   waits for copy k, then k  |  waits for copy k+1, then k+1

- The current stream waits for the copy's event.
- Memory on the device is allocated while the copy stream is current. So torch reuses it for that stream only, and, by
  `record_stream`, only after the current stream's work with it.
- A copy from page-locked memory returns immediately. The host waits, asleep, while two copies are running, or while it
  is three batches ahead.

Experimental: not yet run on a GPU. The tests drive it with a stand-in for `torch.cuda`.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from stream_dataloader._engine.items.layout import is_dense
from stream_dataloader._engine.kept_fields import map_leaves
from stream_dataloader._engine.memory import copies
from stream_dataloader.batch import StreamBatch

if TYPE_CHECKING:
    from typing_extensions import Self


def device_of(name: Any) -> torch.device:
    """Return the device for a name or number."""
    if isinstance(name, bool) or not isinstance(name, (torch.device, str, int)):
        raise TypeError(f"device must be a torch.device, a name or a number, and is {name!r}, a {type(name).__name__}")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device is {name!r}, which torch does not know: {str(error).splitlines()[0]}") from None


def pinned(leaf: Any) -> Any:
    """Return a leaf in page-locked memory; a contiguous one that is in such memory already is not copied."""
    if not isinstance(leaf, torch.Tensor):
        return leaf.pin_memory() if hasattr(leaf, "pin_memory") else leaf
    if leaf.device.type != "cpu" or not is_dense(leaf):
        return leaf
    if not leaf.is_contiguous():  # for example the lanes of one worker
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu", pin_memory=True).copy_(leaf)
    return leaf if leaf.is_pinned() else leaf.pin_memory()


def _there(batch: Any, move: Callable[[Any], Any]) -> Any:
    """Move the leaves of a batch. A `StreamBatch` also keeps its bookkeeping in host memory."""
    there = map_leaves(batch, move)
    return there._moved_from(batch) if isinstance(batch, StreamBatch) else there


def _moved_leaf(leaf: Any, device: torch.device) -> Any:
    return leaf.to(device) if hasattr(leaf, "to") else leaf


class Destination:
    """Last step before the user: moves batches into page-locked memory, and to devices other than CUDA."""

    def __init__(self, device: Any, pin_memory: bool) -> None:
        self.device = None if device is None else device_of(device)
        self._pin_memory = pin_memory

    def __call__(self, batch: Any) -> Any:
        """Move a batch; for CUDA only into page-locked memory, as `OneAhead` copies it to the device."""
        on_cuda = self.device is not None and self.device.type == "cuda"
        if self._pin_memory or on_cuda:
            if torch.cuda.is_available():
                with torch.cuda.device(self.device if on_cuda else None):  # page-locked memory belongs to its context
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
        """Device that batches are moved to; None: they stay in host memory."""
        return self._destination.device

    def to(self, device: torch.device | str | int) -> Self:
        """Move batches to `device` from now on; return the loader."""
        self._destination.device = device_of(device)
        return self

    def cuda(self, device: torch.device | str | int = "cuda") -> Self:
        """Move batches to the CUDA device from now on; see `to`."""
        return self.to(device)

    def cpu(self) -> Self:
        """Move batches to the CPU from now on; see `to`."""
        return self.to("cpu")


_MOST_COPIES = 2  # running at once: of the batch ahead, and of the one before
_MOST_USES = 3  # batches that the host may be ahead of the device


_NOTHING = object()


class OneAhead:
    """Copies batches from host memory to a device on a stream of its own, one batch ahead of the one in use."""

    def __init__(
        self,
        batches: Iterator[Any],
        device: torch.device,
        hold: Callable[[bool, bool], None],  # is told whether a batch, and the end, were fetched but not handed out
        release: Callable[[], None] = lambda: None,  # called on the copy stream when a batch in host memory is dropped
        backend: Any = torch.cuda,
    ) -> None:
        self._batches, self._hold, self._release, self._backend = batches, hold, release, backend
        try:
            self._stream = _copy_stream(backend, backend.current_device() if device.index is None else device.index)
        except (AssertionError, RuntimeError) as error:
            raise RuntimeError(
                f"device is {str(device)!r}, which torch {torch.__version__} cannot use here: "
                f"{str(error).splitlines()[0]}; install a torch built for this machine's GPU, give another device, or "
                "leave device out to keep batches in host memory"
            ) from error
        self._device = self._stream.device
        self._fetched: Any = _NOTHING  # a batch in host memory whose copy has not begun
        self._end: Exception | None = None  # the end, or an error in place of a batch
        self._ahead: tuple[Any, Any] | None = None  # the batch on the device, except leaves that cannot be; its event
        self._copies: deque[Any] = deque()  # events after the last copies
        self._uses: deque[Any] = deque()  # events before the last uses

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._ahead is None:
            self._fetch()
            if self._end is not None:
                self._raise_end()
            self._hold(True, False)
            self._ahead = self._copy()  # an error is raised in place of this batch; the next `next` tries again
        batch = self._on_current_stream(*self._ahead)
        self._fetch()  # while the device still computes with the batch before
        following = None
        if self._end is None:
            with contextlib.suppress(Exception):  # out of memory, for example; raised in its turn if it fails again
                following = self._copy()
        self._ahead = following
        self._hold(self._end is None, self._end is not None)
        return batch

    def _fetch(self) -> None:
        """Fetch a batch to copy, or the end."""
        if self._fetched is not _NOTHING or self._end is not None:
            return
        try:
            self._fetched = next(self._batches)
        except StopIteration as end:
            # The traceback holds this frame, which holds the exception: a cycle, if the user never asks for the end.
            self._end = end.with_traceback(None)
        except Exception as error:
            self._end = error

    def _raise_end(self) -> None:
        error, self._end = self._end, None
        assert error is not None
        self._hold(False, False)
        try:
            raise error
        finally:
            del error  # its traceback holds this frame, and the loader: a cycle that would keep workers alive

    def _copy(self) -> tuple[Any, Any]:
        """Begin to copy the fetched batch, and drop it."""
        _wait_for_all_but(self._copies, _MOST_COPIES - 1)
        with self._backend.stream(self._stream):
            batch = _there(self._fetched, self._ahead_of_use)
            copied = self._backend.Event(blocking=True)
            copied.record(self._stream)
            self._fetched = _NOTHING
            self._release()  # inside the context: the memory is free once the work on this stream is done
        self._copies.append(copied)
        return batch, copied

    def _ahead_of_use(self, leaf: Any) -> Any:
        return leaf.to(self._device, non_blocking=True) if _is_dense_on(leaf, "cpu") else leaf

    def _on_current_stream(self, batch: Any, copied: Any) -> Any:
        """Prepare a copied batch for use on the current stream."""
        _wait_for_all_but(self._uses, _MOST_USES - 1)
        current = self._backend.current_stream(self._device)
        current.wait_event(copied)
        begins = self._backend.Event(blocking=True)
        begins.record(current)
        self._uses.append(begins)

        def take(leaf: Any) -> Any:
            if not _is_dense_on(leaf, self._device.type):
                return _moved_leaf(leaf, self._device)
            leaf.record_stream(current)  # torch reuses its memory only after this stream's work with it
            return leaf

        return _there(batch, take)


def _wait_for_all_but(events: deque[Any], count: int) -> None:
    """Wait until at most `count` events are left, those that were recorded last."""
    while len(events) > count:
        if not events[0].query():
            events[0].synchronize()
        events.popleft()


def _is_dense_on(leaf: Any, kind: str) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type == kind and is_dense(leaf)


@functools.lru_cache(maxsize=64)
def _copy_stream(backend: Any, number: int) -> Any:
    """Return the copy stream of a device; all loaders share it, as freed memory is reused for its own stream only."""
    stream = backend.Stream(torch.device("cuda", number))
    copies.streams.add(stream)
    return stream
