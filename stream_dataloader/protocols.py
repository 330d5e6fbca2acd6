"""The seams between the library and its users' code: who calls what, where and in which order.

A *factory* is called once for each source a lane takes, with that source alone. It runs in the process that
owns the lane: a worker, or the main process with `num_workers=0`. With `lookahead > 0` the call, and the
first `next`, may happen in a background thread of that process; everything after runs in its main thread.
Calls on one stream never overlap, so a stream needs no lock of its own; what streams share (a module's
cache, say) does. The factory must be picklable for `spawn` and `forkserver`, by cloudpickle if not by pickle.

A *stream* is iterated once, from its first item to its last, and then closed, if it has a `close` method
(generators do). It is also closed when an epoch is left early. It is always closed in the process that
opened it.

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
    "PaddingMode",
    "ReadsInto",
    "Schedule",
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


#: `open_stream(source)` opens one stream.
StreamFactory = Callable[[Any], Iterable[Any]]

#: `collate_fn(windows)` gets the list of the B lanes' windows, in lane order.
CollateFn = Callable[[list[Any]], Any]

#: A policy looks at a `StreamError` and answers "raise" or "skip"; it runs in the worker.
ErrorPolicy = Callable[[Any], Literal["raise", "skip"]]
OnError = Literal["raise", "skip"] | ErrorPolicy
