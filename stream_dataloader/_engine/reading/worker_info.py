"""Torch's `get_worker_info`, hidden while streams are opened and read.

A single worker reads a source. Code that shards itself by `get_worker_info()`, as torch's documentation of
`IterableDataset` shows, would read a part of the source and leave the rest to workers that never open it.

Guarantee: while code of streams runs, `get_worker_info()` is None. Torch keeps one value for the whole process, so
other threads see None at that time, too.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Final

from torch.utils.data._utils import worker


class _WorkerInfoHidden:
    """Context, for any number of threads at once, in which `get_worker_info()` is None."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._hidden: Any = None

    def __enter__(self) -> None:
        if worker._worker_info is None and not self._users:  # not a worker process, which is the most frequent case
            return
        with self._lock:
            if worker._worker_info is not None:
                self._hidden, worker._worker_info = worker._worker_info, None
            self._users += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._users:
            return
        with self._lock:
            self._users -= 1
            if not self._users:
                worker._worker_info, self._hidden = self._hidden, None

    def for_good(self) -> None:
        """Hide it until the process ends, as threads that streams start may look at any time."""
        self.__enter__()


worker_info_hidden: Final = _WorkerInfoHidden()
