"""The seams between the library and its users' code: who calls what, where and in which order.

A *factory* is called once for each source a lane takes, with that source alone. It runs in the process that
owns the lane: a worker, or the main process with `num_workers=0`. The factory must be picklable for `spawn` and
`forkserver`, by cloudpickle if not by pickle.

A *stream* is iterated once, from its first item to its last, and then closed, if it has a `close` method
(generators do). It is also closed when an epoch is left early. It is always closed in the process that
opened it.

All of this runs in one thread of that process: the worker's main thread, or the one that asks the loader for its
next batch. No stream is opened before its lane has closed the one before it, so there are never more open than
lanes. Streams may share a buffer, a connection or a library that knows no threads.

A factory that is safe for it may declare `open_early = True` (`OpensEarly`). Workers then open the sources that
lanes reserve (`lookahead`) ahead of need, in a background thread: the factory is called there, and the first
item taken, while other streams are read in the main thread; everything after runs in the main thread. Calls on
one stream never overlap, so a stream needs no lock of its own; what streams share does. Batches are the same
either way.

A stream that is not to begin at its first item (a loader goes on from a saved state, a connection or a worker was
lost) is read forward to there, unless the factory or the stream opted into something quicker::

    def open_stream(source, start=0)        the factory has a parameter `start` whose default is the integer 0:
                                            it is passed the number of the first item wanted
    iter(stream).seek_item(n)               the iterator goes to item n (`SeeksItems`); called before its first `next`
    iter(stream).load_state_dict(state)     the iterator goes where it was when its `state_dict()` returned that

The last two are looked for where a position is kept: on the iterator, which is the stream itself only if
`iter(stream) is stream`. On a stream whose `iter` returns another object they are left alone, as that object may
know nothing of them. `testing.StreamContract` finds a stream that goes elsewhere than it was told to.

A stream that can write its items to memory it is given may offer `read_into` (`ReadsInto`): the batch itself
is that memory then, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

__all__ = [
    "CollateFn",
    "ErrorPolicy",
    "Exhausted",
    "OnError",
    "OpensEarly",
    "PaddingMode",
    "ReadsInto",
    "Schedule",
    "SeeksItems",
    "Stream",
    "StreamFactory",
    "Transport",
    "Windows",
]

PaddingMode = Literal["zeros", "data", "drop", "cycle"]
Windows = Literal["aligned", "packed"]
Transport = Literal["auto", "shared_memory", "queue"]
Schedule = Literal["listed", "longest_first", "balanced"]
Exhausted = Literal["drop", "repeat"]

Item_co = TypeVar("Item_co", covariant=True)


@runtime_checkable
class Stream(Protocol[Item_co]):
    """What a factory returns: the items of one source, in time order.

    Any iterable will do: a generator, a list, a file. A `close()` method, if there is one, is called once
    after the last item, after an error, or when the epoch is left early.
    """

    def __iter__(self) -> Iterator[Item_co]:
        """Start reading; called once."""
        ...


@runtime_checkable
class ReadsInto(Stream[Item_co], Protocol[Item_co]):
    """A stream of single time steps that writes them where they are wanted: into the batch.

    Its first item is taken from its iterator, and tells what items look like. From then on, with the dataset's
    `time_steps`, only `read_into` is called, in the worker's main thread; it goes on behind what was iterated.
    Items with leaves that are objects, and streams that cut their own windows, are iterated as ever.

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
        """Write the next items, at most as many as there is room for.

        Args:
            out: An item's structure, whose leaves are NumPy arrays `(n, ...)` to be written to, of the first
                item's dtypes and shapes; tensors where NumPy lacks the dtype (bfloat16). Not to be kept.

        Returns:
            How many time steps were written, from the first on: 1 to n, or 0 at the stream's end. What was
            read before an error belongs to this call, the error to the next.
        """
        ...


class SeeksItems(Iterator[Item_co], Protocol[Item_co]):
    """An iterator that goes to any item: what a stream is, or what its `iter` returns.

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
        """Go to an item, counted from the stream's first as 0: the next `next` returns it, or ends at its end."""
        ...


class OpensEarly(Protocol):
    """A factory that may be called, and its streams' first items taken, in another thread than streams are read in.

    The declaration is for the code it stands beside: a class that overrides `__call__` declares anew.

    Attributes:
        open_early: True, and nothing else that is true. A function has it as an attribute, too.
    """

    open_early: bool

    def __call__(self, source: Any) -> Iterable[Any]:
        """Open one stream; in either thread, also while it is called in the other."""
        ...


#: `open_stream(source)` opens one stream.
StreamFactory = Callable[[Any], Iterable[Any]]

#: `collate_fn(windows)` gets the list of the B lanes' windows, in lane order.
CollateFn = Callable[[list[Any]], Any]

#: A policy looks at a `StreamError` and answers "raise" or "skip"; it runs in the worker.
ErrorPolicy = Callable[[Any], Literal["raise", "skip"]]
OnError = Literal["raise", "skip"] | ErrorPolicy
