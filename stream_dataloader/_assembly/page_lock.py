"""Page-locked memory: the slots' memory is locked once, and a slot is freed when no device reads it any more.

Guarantees: a slot is not written again while a CUDA device may still be reading it. Memory is unlocked before it is
unmapped, in the process that locked it. A driver that refuses costs speed, never an error later on.

- Pages that are unmapped first make the next mapping there "already registered". Python unmaps an `mmap` *before* it
  calls weak references to it, so an array over it is watched, whose callback holds the `mmap`.
- A copy may return before it has begun. An event that is recorded on a stream is passed when all that was begun there
  before is done, and is asked for, never waited for.

Nothing here has run on a CUDA device yet: the tests drive it with a stand-in for `torch.cuda`.
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

from stream_dataloader._memory import copies

cuda: Any = torch.cuda  # of which not all has types
_PORTABLE = 1  # cudaHostRegisterPortable: locked for all devices, not only the one that is current


class PendingCopies:
    """Frees memory once no CUDA device reads it any more.

    Known are the loader's own copies, and those on the current stream of the current device where the memory is let go;
    for any other the user must hold the batch.
    """

    def __init__(self) -> None:
        #: What is to be freed, and the events that are waited for.
        self.waiting: deque[tuple[list[Any] | None, Callable[[], Any]]] = deque()

    def free_after(self, free: Callable[[], Any]) -> None:
        """Call `free` once the copies begun so far are done: at once if there are none, or from `poll`."""
        try:
            events = self._events() if cuda.is_initialized() else []
        except Exception:  # the device is lost, or the interpreter ends: the memory stays out of use
            return
        if events == []:
            free()
        else:
            self.waiting.append((events, free))

    def _events(self) -> list[Any] | None:
        """An event behind all that was begun so far, on each device in use; None while a graph is captured."""
        numbers = frozenset(copies.devices)
        current = cuda.current_device()
        if current not in numbers and _is_in_use(current):
            copies.devices.add(current)
            numbers |= {current}
        if current in numbers and cuda.is_current_stream_capturing():  # to ask this creates a context, too
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
                if events is None:  # it was let go while a graph was captured
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
        """Wait for the copies that have been begun so far; a lost device is not waited for."""
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
    except RuntimeError:  # an allocator that does not count
        return True


def _recorded(stream: Any) -> Any:
    event = cuda.Event()
    event.record(stream)
    return event


class LockedPages(np.ndarray[Any, Any]):
    """Memory that is page-locked for as long as it is there.

    A type of its own: a new array keeps alive the innermost one of its type. That is to be the lease.
    """


def lock_pages(memory: Any, copies: PendingCopies, device: torch.device | None = None) -> LockedPages | None:
    """Lock a mapping for as long as the array returned, or one over it, is there; None, with a warning, if refused.

    Args:
        copies: What may be reading it when it is given back.
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
    with contextlib.suppress(Exception):  # a lost device has unlocked it
        runtime.cudaHostUnregister(address)


def _clear_last_error() -> None:
    """Have torch's check of a kernel clear the error that a call left behind, or it would be raised far from here."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, dtype=torch.float32, device=torch.device("cuda", cuda.current_device()))
