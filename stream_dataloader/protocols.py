"""The seams between the library and its users' code: who calls what, where and in which order.

A *factory* is called once for each source a lane takes, with that source alone. It runs in the process that
owns the lane: a worker, or the main process with `num_workers=0`. With `lookahead > 0` the call, and the
first `next`, may happen in a background thread of that process; everything after runs in its main thread.
Calls on one stream never overlap, so a stream needs no lock of its own; what streams share (a module's
cache, say) does. The factory must be picklable for `spawn` and `forkserver`, by cloudpickle if not by pickle.

A *stream* is iterated once, from its first item to its last, and then closed, if it has a `close` method
(generators do). It is also closed when an epoch is left early. It is always closed in the process that
opened it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

__all__ = [
    "CollateFn",
    "ErrorPolicy",
    "OnError",
    "PaddingMode",
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


#: `open_stream(source)` opens one stream.
StreamFactory = Callable[[Any], Iterable[Any]]

#: `collate_fn(windows)` gets the list of the B lanes' windows, in lane order.
CollateFn = Callable[[list[Any]], Any]

#: A policy looks at a `StreamError` and answers "raise" or "skip"; it runs in the worker.
ErrorPolicy = Callable[[Any], Literal["raise", "skip"]]
OnError = Literal["raise", "skip"] | ErrorPolicy
