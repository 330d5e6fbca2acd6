"""Batches on the way to an accelerator: page-locked memory, and copies ahead of use.

Guarantees: memory is locked once, not batch by batch. A batch in host memory is held until its copy is finished. An
error is raised in place of the batch it belongs to, although batches are fetched one ahead.

Nothing here has run on a CUDA device yet: the tests drive it with a stand-in for `torch.cuda`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from stream_dataloader._items.layout import is_dense
from stream_dataloader.batch import StreamBatch, map_leaves

if TYPE_CHECKING:
    from typing_extensions import Self


def device_of(name: Any) -> torch.device:
    """The device of a name or number.

    Raises:
        ValueError: torch knows none of that name.
        TypeError: It is no name and no number.
    """
    if isinstance(name, torch.device):
        return name
    if isinstance(name, bool) or not isinstance(name, (str, int)):
        raise TypeError(f"device must be a torch.device, a name or a number, and is {name!r}, a {type(name).__name__}")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device is {name!r}, which torch does not know: {str(error).splitlines()[0]}") from None


def pinned(batch: Any) -> Any:
    """`batch` in page-locked memory; what lies in such memory already stays where it is."""
    return map_leaves(batch, lambda leaf: leaf.pin_memory() if _is_pageable(leaf) else leaf)


def _is_pageable(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return leaf.device.type == "cpu" and is_dense(leaf) and not leaf.is_pinned()
    return hasattr(leaf, "pin_memory")


def moved(batch: Any, device: torch.device, *, non_blocking: bool) -> Any:
    """`batch` on a device. A `StreamBatch` keeps its bookkeeping in host memory, too."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        return leaf.to(device) if hasattr(leaf, "to") else leaf

    there = map_leaves(batch, move)
    return there.moved_from(batch) if isinstance(batch, StreamBatch) else there


class Destination:
    """The last touch on the way to the user: page-locked memory, and a device that is not one of CUDA.

    Args:
        device: Where batches are moved to; None: they stay in host memory.
        pin_memory: Put them into page-locked memory.

    Attributes:
        device: As given, or set since.
    """

    def __init__(self, device: Any, pin_memory: bool) -> None:
        self.device = None if device is None else device_of(device)
        self._pin_memory = pin_memory

    def __call__(self, batch: Any) -> Any:
        """The batch there; on CUDA, `OneAhead` takes it there."""
        if self._pin_memory:
            if torch.cuda.is_available():
                batch = pinned(batch)
            else:
                warnings.warn("pin_memory=True has no effect: no CUDA device is available", stacklevel=4)
        if self.device is not None and self.device.type != "cuda":
            batch = moved(batch, self.device, non_blocking=self._pin_memory)
        return batch


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


class OneAhead:
    """Copies batches to a device on a stream of its own, one batch ahead of the one in use.

    Args:
        batches: Yields batches in host memory.
        device: The device to copy them to.
        hold: Called with what was fetched and not handed out yet: whether a batch, and whether the end.
        backend: `torch.cuda`, or a stand-in.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        device: torch.device,
        hold: Callable[[bool, bool], None],
        backend: Any = torch.cuda,
    ) -> None:
        self._batches, self._device, self._hold, self._backend = batches, device, hold, backend
        self._stream = backend.Stream(device)
        self._ahead: tuple[Any, Any, Any] | Exception | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._ahead is None:
            self._ahead = self._load()
        if isinstance(self._ahead, Exception):
            error, self._ahead = self._ahead, None
            self._hold(False, False)
            try:
                raise error
            finally:
                del error  # its traceback leads here, and up to the loader: a circle would keep workers alive
        on_device, in_host, copied = self._ahead
        self._ahead = self._load()  # while the batch before is still being computed with
        failed = isinstance(self._ahead, Exception)
        self._hold(not failed, failed)
        current = self._backend.current_stream(self._device)
        current.wait_event(copied)
        map_leaves(on_device, lambda leaf: _used_on(leaf, current))
        copied.synchronize()  # begun one batch ago: only then may workers write to the slot again
        del in_host
        return on_device

    def _load(self) -> tuple[Any, Any, Any] | Exception:
        try:
            in_host = next(self._batches)
        except StopIteration as end:
            return end.with_traceback(None)  # which leads back here: who never asks for the end would leave a circle
        except Exception as error:
            return error
        with self._backend.stream(self._stream):
            on_device = moved(in_host, self._device, non_blocking=True)
            copied = self._backend.Event()
            copied.record(self._stream)
        return on_device, in_host, copied


def _used_on(leaf: Any, stream: Any) -> Any:
    """The leaf, whose memory is not handed out again before what `stream` does with it is done."""
    if isinstance(leaf, torch.Tensor):
        leaf.record_stream(stream)
    return leaf
