"""The interfaces between the library and its users' code, with the process, thread and order of each call.

A *factory* is called once for each source a lane takes, in the process that owns the lane: a worker, or the main
process with `num_workers=0`. It must be picklable for `spawn` and `forkserver`, by cloudpickle if not by pickle.

A *stream* is iterated once, and then closed, if it has a `close` method (generators have one), also when an epoch is
left early. A lane closes one stream before it opens the next. All of this runs in one thread: the worker's main thread,
or the one that asks the loader for its next batch. So streams may share a buffer, a connection or a library that is not
thread-safe. This does not hold with `worker_method="thread"`, where a process has several such threads, or for streams
that `streams.live` reads, each in a thread of its own.

A stream that has no item at the moment may yield `streams.NOTHING_YET` instead of waiting. The rest of its lane's
window is then padded, and the lane asks again for its next window.

A stream that must begin later than at its first item, after a resume or a lost worker, is read forward to that item,
unless it or its factory has a faster way::

    def open_stream(source, start=0)        the factory has a parameter `start` whose default is the integer 0:
                                            it is passed the number of the first item to yield
    iter(stream).seek_item(n)               the iterator goes to item n (`SeeksItems`); called before its first `next`
    iter(stream).load_state_dict(state)     the iterator goes to the place where its `state_dict()` returned that state

`seek_item` and `load_state_dict` are looked up on `iter(stream)`. A stream that defines them must return itself from
`__iter__`.

Items are copied when they are taken, so a stream may yield the same array, tensor, list, set, dict or bytearray again
and again, with other content. Objects of other types are not copied: yield a new one each time.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

__all__ = [
    "KnowsLengths",
    "MarksStarts",
    "OpensEarly",
    "ReadsInto",
    "SeeksItems",
    "Stream",
    "StreamFactory",
]


class NothingYet(enum.Enum):
    """The type of `NOTHING_YET`; an enum, because its member is the same object after pickling."""

    NOTHING_YET = "no item at the moment"


#: Yielded by a stream in place of an item that has not arrived yet.
NOTHING_YET: Final = NothingYet.NOTHING_YET

Item_co = TypeVar("Item_co", covariant=True)


@runtime_checkable
class Stream(Protocol[Item_co]):
    """The items of one source, in time order, as a factory returns them.

    It may be any iterable: a generator, a list, a file. If it has a `close()` method, that is called once: after the
    last item, after an error, or when the epoch is left early.
    """

    def __iter__(self) -> Iterator[Item_co]:
        """Start reading; called once."""
        ...


@runtime_checkable
class ReadsInto(Stream[Item_co], Protocol[Item_co]):
    """A stream of single time steps that writes them straight into the batch.

    The first item is taken from the stream's iterator, and sets the layout of items. From then on, with the dataset's
    `time_steps`, only `read_into` is called, in the worker's main thread; it continues after the items that were
    iterated. Streams with leaves that are objects, and streams that cut their own windows, are only iterated.

    Example:
        >>> import numpy as np
        >>> from stream_dataloader import StreamDataLoader, StreamDataset
        >>> class Ramp:
        ...     def __init__(self, stop):
        ...         self.position, self.stop = 0, stop
        ...     def __iter__(self):
        ...         while self.position < self.stop:
        ...             self.position += 1
        ...             yield np.array([self.position - 1])
        ...     def read_into(self, out):
        ...         count = min(len(out), self.stop - self.position)
        ...         out[:count, 0] = np.arange(self.position, self.position + count)
        ...         self.position += count
        ...         return count
        >>> loader = StreamDataLoader(StreamDataset([5, 2], Ramp, batch_size=2, time_steps=3))
        >>> [batch.data[..., 0].T.tolist() for batch in loader]
        [[[0, 1, 2], [0, 1, 0]], [[3, 4, 0], [0, 0, 0]]]
    """

    def read_into(self, out: Any) -> int:
        """Write the next items, as far as there is room.

        Args:
            out: The structure of an item, whose leaves are NumPy arrays `(n, ...)` to write to, with the first item's
                dtypes and shapes; tensors if NumPy lacks the dtype (bfloat16). Do not keep them.

        Returns:
            Number of time steps written, from the first row on: 1 to n, or 0 at the stream's end. If an error follows
            some items, return their number, and raise the error in the next call.
        """
        ...


@runtime_checkable
class MarksStarts(Stream[Item_co], Protocol[Item_co]):
    """A stream of single time steps that contains several sequences, such as documents.

    The batch's `is_first` is also set at the beginning of each sequence, even in the middle of a window, as for packed
    streams. `reset`, `recurrent.seq_idx` and `recurrent.cu_seqlens` follow it.

    Example:
        >>> from stream_dataloader import StreamDataLoader, StreamDataset, recurrent
        >>> class Words(str):
        ...     def starts_within(self, start, stop):
        ...         return [i for i in range(start, stop) if self[i - 1 : i] == " "]
        >>> dataset = StreamDataset(["to be or"], Words, 1, time_steps=4)
        >>> for batch in StreamDataLoader(dataset):
        ...     print(recurrent.seq_idx(batch).tolist(), batch.reset.tolist())
        [[1, 1, 1, 2]] [True]
        [[0, 0, 1, 1]] [False]
    """

    def starts_within(self, start: int, stop: int) -> Iterable[int]:
        """Return the items in `[start, stop)` that begin a sequence.

        It is called after these items were read, for each item once, in order. Items are counted from the stream's
        first, even if the stream was opened at a later one. The first item needs no mark.
        """
        ...


class SeeksItems(Iterator[Item_co], Protocol[Item_co]):
    """An iterator that can go to any item: a stream itself, or the object that its `__iter__` returns.

    Example:
        >>> class Ramp:
        ...     def __init__(self, stop):
        ...         self.position, self.stop = 0, stop
        ...     def __iter__(self):
        ...         return self
        ...     def __next__(self):
        ...         if self.position == self.stop:
        ...             raise StopIteration
        ...         self.position += 1
        ...         return self.position - 1
        ...     def seek_item(self, item):
        ...         self.position = item
        >>> ramp = iter(Ramp(5))
        >>> ramp.seek_item(3)
        >>> list(ramp)
        [3, 4]
    """

    def seek_item(self, item: int) -> None:
        """Go to an item, counted from 0: the following `next` returns it, or raises `StopIteration` at the end."""
        ...


class OpensEarly(Protocol):
    """A factory that may run in a second thread, besides the one that reads streams, up to a stream's first item.

    Workers then open the sources that lanes reserve (`lookahead`) ahead of need. Calls on one stream never overlap, so
    only objects that streams share need a lock. Batches are the same either way.

    The declaration holds for the class that makes it. A subclass that overrides `__call__` must declare it again.

    Attributes:
        open_early: `True` itself; other true values do not count. A function may have it as an attribute.
    """

    open_early: bool

    def __call__(self, source: Any) -> Iterable[Any]:
        """Open one stream; may be called in both threads at once."""
        ...


@runtime_checkable
class KnowsLengths(Protocol):
    """A factory that knows the numbers of items, so that `StreamDataset` needs no `lengths`."""

    def lengths_of(self, sources: Any) -> Any:
        """Return the number of items of each source, `(sources,)`; None if not known, or for foreign sources."""
        ...


#: `open_stream(source)` opens one stream.
StreamFactory = Callable[[Any], Iterable[Any]]
