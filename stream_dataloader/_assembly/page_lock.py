"""Page-locked memory: the slots' memory is locked once, and freed when no copy reads it any more.

Guarantee: a slot is not written again while an accelerator may still be reading it.

Nothing here has run on a CUDA device yet: the tests drive it with a stand-in for `torch.cuda`.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def lock_pages(memory: Any, backend: Any = torch.cuda) -> bool:
    """Have the driver lock memory for as long as it is mapped; False, with a warning, if it refuses.

    Args:
        memory: A buffer that can be written to.
        backend: `torch.cuda`, or a stand-in.
    """
    array: np.ndarray[Any, Any] = np.frombuffer(memory, np.uint8)
    address, runtime = array.ctypes.data, backend.cudart()
    status = int(runtime.cudaHostRegister(address, array.nbytes, 0))
    if status:
        warnings.warn(
            f"the CUDA driver would not lock the loader's shared memory (cudaHostRegister: error {status}, "
            f"{array.nbytes} bytes); batches are copied to page-locked memory one by one",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return True


class PendingCopies:
    """Frees memory once an accelerator no longer reads it.

    Only copies that were begun on the stream that is current where the memory is let go are known. A user who copies
    on another stream must hold the batch until that copy is done.

    Args:
        backend: `torch.cuda`, or a stand-in.
    """

    def __init__(self, backend: Any = torch.cuda) -> None:
        self._backend = backend
        self._waiting: list[tuple[Any, Callable[[], None]]] = []

    def free_after(self, free: Callable[[], None]) -> None:
        """Call `free`, from `poll`, once the copies that have been begun so far are done."""
        event = self._backend.Event()
        event.record()
        self._waiting.append((event, free))

    def poll(self) -> None:
        """Free the memory that is no longer read."""
        while self._waiting and self._waiting[0][0].query():
            self._waiting.pop(0)[1]()
