"""Large arrays of sources: each is kept once, however many sources hold it.

Pickle (protocol 5) hands an array's memory out beside its pickle. All of this memory is held until packing is done, so
two buffers at the same address are the same array::

    [(a, 0, 5), (a, 5, 9), (b, 0, 4)]   ->   pickles  p0, p1 | p2,   which use the buffers 0, 0, 1 of (a, b)
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["ArrayBuffers", "Block", "BufferTaker", "PickleBlock", "RepeatedArrayError"]

_LARGE_BYTES = 1 << 16  # a smaller buffer stays in its pickle
_NUMBERS = "biufc"  # kinds of dtypes that their `str` describes

#: The most bytes for copies of one array. Tensors and strided arrays cannot be handed out, so each source gets a copy.
_MOST_COPIED_BYTES = 1 << 28


class Block(NamedTuple):
    """Some sources, pickled, and the numbers of the buffers that unpickling needs."""

    pickled: Any
    arrays: Sequence[int]


class RepeatedArrayError(ValueError):
    """Sources that would each take a copy of one large array."""


class ArrayBuffers:
    """The large buffers of all sources.

    Attributes:
        contents: The buffers' memory, by their numbers.
    """

    def __init__(self) -> None:
        self.contents: list[memoryview] = []
        self._numbers: dict[tuple[int, int], int] = {}  # by address and size
        self._copies: Counter[tuple[int, int]] = Counter()  # of arrays that cannot be handed out, by address and size

    def pickled(self, sources: list[Any], dumps: PickleBlock) -> Block:
        """Pickle some sources without their large buffers."""
        taker = BufferTaker(self)
        return Block(dumps(sources, taker), taker.numbers)

    def number_of(self, memory: memoryview) -> int:
        """Return the number of a buffer, which is held from now on."""
        address = int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])
        number = self._numbers.setdefault((address, memory.nbytes), len(self.contents))
        if number == len(self.contents):
            self.contents.append(memory)
        return number

    def count_copy(self, address: int, size: int, what: str, remedy: str) -> None:
        """Refuse copies of one array that take too much together."""
        self._copies[address, size] += 1
        if (copies := self._copies[address, size]) > 1 and copies * size > _MOST_COPIED_BYTES:
            raise RepeatedArrayError(
                f"{copies} sources or more hold the same {what} of {size:,} bytes, and each would take a copy of it "
                f"(at most {_MOST_COPIED_BYTES:,} bytes together); {remedy}, which all sources share, or pass "
                "sources=range(n) and keep the array in open_stream"
            )

    def shared_in(self, blocks: Iterable[Sequence[int]]) -> list[bool]:
        """Return for each buffer whether several blocks use it."""
        uses = Counter(number for used in blocks for number in set(used))
        return [uses[number] > 1 for number in range(len(self.contents))]


class BufferTaker:
    """Takes the large buffers out of one pickle, and counts the copies that stay in it.

    Attributes:
        numbers: Numbers of the buffers, in the order in which unpickling needs them.
    """

    def __init__(self, arrays: ArrayBuffers) -> None:
        self.numbers: list[int] = []
        self._arrays = arrays

    def take(self, buffer: pickle.PickleBuffer) -> bool:
        """Take a buffer, or return True to leave it in the pickle."""
        memory = buffer.raw()
        if memory.nbytes < _LARGE_BYTES:
            return True
        self.numbers.append(self._arrays.number_of(memory))
        return False

    def reduce_array(self, array: Any) -> Any:
        """Reduce an array as pickle does; a small one in a form that is loaded in a third of the time."""
        flags, dtype = array.flags, array.dtype
        if array.nbytes < _LARGE_BYTES:
            if flags.c_contiguous and dtype.kind in _NUMBERS and dtype.metadata is None:
                memory = array.tobytes()
                return np.ndarray, (array.shape, dtype.str, bytearray(memory) if flags.writeable else memory)
        elif not (flags.c_contiguous or flags.f_contiguous):
            address = array.__array_interface__["data"][0]
            self._arrays.count_copy(address, array.nbytes, "strided array", "pass numpy.ascontiguousarray(array)")
        return array.__reduce_ex__(5)

    def reduce_tensor(self, tensor: torch.Tensor) -> Any:
        """Reduce a tensor as pickle does, which stores the whole storage behind a view."""
        if tensor.layout is torch.strided and tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            if (size := storage.nbytes()) >= _LARGE_BYTES:
                self._arrays.count_copy(storage.data_ptr(), size, "tensor", "pass its .numpy()")
        reduced: Any = tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
        return reduced


#: Pickles some sources.
PickleBlock = Callable[[Any, BufferTaker], bytes]
