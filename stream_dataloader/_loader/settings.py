"""`WorkerSettings`: what worker processes are started with, checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any

from stream_dataloader import _options as options
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.protocols import Transport


@dataclass(frozen=True)
class WorkerSettings:
    """Options of a `StreamDataLoader` that are about its workers; see there."""

    prefetch_factor: int | None
    persistent_workers: bool
    multiprocessing_context: str | BaseContext | None
    worker_init_fn: Callable[[int], Any] | None
    timeout: float
    pin_memory: bool
    transport: Transport

    @classmethod
    def checked(
        cls,
        *,
        prefetch_factor: Any,
        persistent_workers: Any,
        multiprocessing_context: Any,
        worker_init_fn: Any,
        timeout: Any,
        pin_memory: Any,
        transport: Any,
    ) -> WorkerSettings:
        """The settings that these options make.

        Raises:
            ValueError: A value is out of range or unknown.
            TypeError: A value is of the wrong type.
        """
        if prefetch_factor is not None:
            prefetch_factor = options.integer("prefetch_factor", prefetch_factor, 1, 1 << 16)
        check_init(worker_init_fn)
        return cls(
            prefetch_factor=prefetch_factor,
            persistent_workers=options.flag("persistent_workers", persistent_workers),
            multiprocessing_context=options.check_context(multiprocessing_context),
            worker_init_fn=worker_init_fn,
            timeout=options.seconds("timeout", timeout),
            pin_memory=options.flag("pin_memory", pin_memory),
            transport=options.choice("transport", transport, Transport),
        )


def check_dataset(dataset: Any) -> StreamDataset:
    """`dataset`, which a loader can read.

    Raises:
        TypeError: It is no `StreamDataset`.
    """
    if not isinstance(dataset, StreamDataset):
        raise TypeError(
            f"dataset must be a StreamDataset, and is a {type(dataset).__name__}; sources go into "
            "StreamDataset(sources, open_stream, batch_size)"
        )
    return dataset


def check_init(worker_init_fn: Any) -> None:
    """Refuse what a worker cannot call.

    Raises:
        TypeError: It is not callable, and not None.
    """
    if worker_init_fn is not None:
        options.check_callable("worker_init_fn", worker_init_fn, "a function of the worker's id, or None")
