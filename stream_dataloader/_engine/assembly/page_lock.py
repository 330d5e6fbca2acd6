"""Page-locked memory: the slots' memory is locked once, and a slot is freed when no device reads it any more.

Guarantees: a slot is not written again while a CUDA device may still be reading it. Memory is unlocked before it is
unmapped, in the process that locked it. A driver that refuses costs speed, never an error later on.

- If pages are unmapped while they are locked, the driver calls the next mapping at that address "already registered".
  Python unmaps an `mmap` *before* it calls weak references to it. So the weak reference watches an array over the
  `mmap`, and its callback holds the `mmap`.
- A copy may return before it has begun. An event that is recorded on a stream is complete when all earlier work on that
  stream is done. Events are polled, never waited for.

Experimental: not yet run on a GPU. The tests drive it with a stand-in for `torch.cuda`.
"""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from stream_dataloader._engine.memory import copies

cuda: Any = torch.cuda  # Any, because parts of it have no types
_PORTABLE = 1  # cudaHostRegisterPortable: locked for all devices, not only the current one


class PendingCopies:
    """Frees memory once no CUDA device reads it any more.

    It knows the loader's own copies, and those on the stream and device that are current when the memory is released.
    During any other copy the user must hold the batch.
    """

    def __init__(self) -> None:
        #: Events to come first, and the function that frees the memory after them.
        self.waiting: deque[tuple[list[Any] | None, Callable[[], Any]]] = deque()

    def free_after(self, free: Callable[[], Any]) -> None:
        """Call `free` once the copies begun so far are done: now if there are none, otherwise from `poll`."""
        try:
            events = self._events() if cuda.is_initialized() else []
        except Exception:  # The device is lost, or the interpreter exits. The memory stays unused, which is safe.
            return
        if events == []:
            free()
        else:
            self.waiting.append((events, free))

    def _events(self) -> list[Any] | None:
        """Record an event after all copies so far, on each device in use; return None while a graph is captured."""
        numbers = frozenset(copies.devices)
        current = cuda.current_device()
        if current not in numbers and _is_in_use(current):
            copies.devices.add(current)
            numbers |= {current}
        # This question creates a context on the device, so it is asked only where one is in use.
        if current in numbers and cuda.is_current_stream_capturing():
            return None
        streams = {cuda.current_stream(number) for number in numbers} | copies.streams
        return list(map(_recorded, streams))

    def poll(self) -> None:
        """Free the memory that is no longer read.

        Raises:
            RuntimeError: The device is lost; the memory it may have read stays out of use.
        """
        while self.waiting:
            events, free = self.waiting[0]
            try:
                if events is None:  # released while a graph was captured, when no event could be recorded
                    events = self._events()
                    self.waiting[0] = events, free
                done = events is not None and all(event.query() for event in events)
            except Exception:
                self.waiting.popleft()
                raise
            if not done:
                return
            self.waiting.popleft()
            free()

    def wait(self) -> None:
        """Wait for the copies that have begun so far; do not wait for a lost device."""
        self.free_after(int)
        while self.waiting:
            events, free = self.waiting.popleft()
            with contextlib.suppress(Exception):
                for event in (self._events() if events is None else events) or ():
                    event.synchronize()
                free()


def _is_in_use(number: int) -> bool:
    try:
        return bool(cuda.memory_reserved(number))
    except RuntimeError:  # the allocator does not count, so assume that the device is in use
        return True


def _recorded(stream: Any) -> Any:
    event = cuda.Event()
    event.record(stream)
    return event


class LockedPages(np.ndarray[Any, Any]):
    """Memory that is page-locked as long as it exists.

    It needs a type of its own: numpy makes a new array's base the innermost array of the same type, and for arrays over
    a slot that must be the lease's array, not this one.
    """


def lock_pages(memory: Any, copies: PendingCopies, device: torch.device | None = None) -> LockedPages | None:
    """Lock a mapping as long as the returned array, or one over it, exists; return None, with a warning, if refused.

    Args:
        copies: Copies that may still read the memory when it is unlocked.
        device: The device that will read it, whose context is used; None: the current one.
    """
    array: LockedPages = LockedPages(len(memory), np.uint8, memory)
    address, runtime = array.ctypes.data, cuda.cudart()
    with cuda.device(device):
        status = int(runtime.cudaHostRegister(address, array.nbytes, _PORTABLE))
        if status:
            _clear_last_error()
    if status:
        warnings.warn(
            f"the CUDA driver would not lock the loader's shared memory (cudaHostRegister: error {status}, "
            f"{array.nbytes} bytes); batches are copied to page-locked memory one by one",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    weakref.finalize(array, _unlock, runtime, address, copies, os.getpid(), memory).atexit = False
    return array


def _unlock(runtime: Any, address: int, copies: PendingCopies, owner: int, _mapped: Any) -> None:
    if os.getpid() != owner:
        return
    copies.wait()
    with contextlib.suppress(Exception):  # with a lost device the memory is unlocked already
        runtime.cudaHostUnregister(address)


def _clear_last_error() -> None:
    """Clear the error that a failed call left behind, by a kernel whose check reads it.

    Otherwise it would be raised by an unrelated call much later.
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, dtype=torch.float32, device=torch.device("cuda", cuda.current_device()))
