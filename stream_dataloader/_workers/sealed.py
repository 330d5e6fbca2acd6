"""Messages of workers, on both sides of the queue.

Guarantee: what a worker sent is fetched while the worker is there, and an error in unpickling it is raised where the
message is read: at its own step.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from stream_dataloader._memory.pickling import Message
from stream_dataloader.errors import detached

__all__ = ["Arrived", "Sealed"]


class Sealed(Message):
    """A message, in the worker: it arrives as `Arrived`."""

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return Arrived, (self._pickled,)


class Arrived:
    """A message that has arrived.

    It is unpickled at once: large items are fetched from the process that sent them, which may end before it is read.

    Args:
        pickled: It, as it was sent.
    """

    def __init__(self, pickled: bytes) -> None:
        self._content: Any = None
        self._error: Exception | None = None
        try:
            self._content = pickle.loads(pickled)
        except Exception as error:
            self._error = detached(error)  # its frames may hold a connection that a worker waits for

    def read(self) -> Any:
        """What it carries.

        Raises:
            Exception: What unpickling it raised.
        """
        if self._error is not None:
            raise self._error
        return self._content
