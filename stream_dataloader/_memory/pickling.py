"""Takes functions, classes and objects to other processes, with cloudpickle where pickle will not do.

Guarantee: what cannot be pickled raises where it is sent from. multiprocessing's queues would lose it in a
background thread, and the receiver would wait for ever.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle


def dumps(content: Any) -> bytes:
    """Pickle, by value if it must be: lambdas, local functions and classes, those of an interactive session."""
    interactive = not hasattr(sys.modules["__main__"], "__file__")  # its functions exist here only
    first, second = (cloudpickle.dumps, _forking_dumps) if interactive else (_forking_dumps, cloudpickle.dumps)
    try:
        return bytes(first(content))
    except Exception:  # the second one says why, if it cannot either
        return bytes(second(content))


def _forking_dumps(content: Any) -> bytes:
    return bytes(ForkingPickler.dumps(content))


def spawning() -> bool:
    """Whether this pickling is on behalf of a process that is being started."""
    return get_spawning_popen() is not None


class ByValue:
    """Wraps something that pickle may not be able to take along; unpickles to a `ByValue` of it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Callable[[bytes], ByValue], tuple[bytes]]:
        return _by_value, (dumps(self.value),)


def _by_value(pickled: bytes) -> ByValue:
    return ByValue(pickle.loads(pickled))


class Message:
    """Carries anything through a worker's queue: it is pickled at once, and arrives as what it carries."""

    def __init__(self, content: Any) -> None:
        self._pickled = dumps(content)

    def __len__(self) -> int:
        """Bytes of it."""
        return len(self._pickled)

    def read(self) -> Any:
        """What it carries, anew each time."""
        return pickle.loads(self._pickled)

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (self._pickled,)


class Sealed(Message):
    """A message that arrives as it is: its receiver reads it, and learns why it cannot."""

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return _sealed, (self._pickled,)


def _sealed(pickled: bytes) -> Sealed:
    message = object.__new__(Sealed)
    message._pickled = pickled
    return message
