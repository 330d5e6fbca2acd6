"""Options of a loader for its workers, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any, Literal

from stream_dataloader._engine import options
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import shorten

WorkerMethod = Literal["process", "thread", "ray"]

#: Options of a task that the loader sets: it restarts workers itself.
_OWN_RAY_ARGS = {"max_retries", "num_returns", "retry_exceptions"}


@dataclass(frozen=True)
class WorkerSettings:
    """Options of a `StreamDataLoader` for its workers; see there.

    Attributes:
        uses_slots: Whether workers write to shared memory. Without it they send messages, as they must where the system
            has no shared memory; tests set it so.
    """

    num_workers: int
    prefetch_factor: int | None
    persistent_workers: bool
    multiprocessing_context: str | BaseContext | None
    worker_init_fn: Callable[[int], Any] | None
    timeout: float
    pin_memory: bool
    max_restarts: int
    worker_method: WorkerMethod
    ray_remote_args: Mapping[str, Any] | None = None
    uses_slots: bool = True

    @property
    def batches_ahead(self) -> int:
        """Number of batches that each worker reads ahead: as given, or 2, as in torch's `DataLoader`."""
        return self.prefetch_factor or 2

    def __post_init__(self) -> None:
        options.choice("worker_method", self.worker_method, WorkerMethod)
        options.check_context(self.multiprocessing_context)
        if self.worker_init_fn is not None:
            options.check_callable("worker_init_fn", self.worker_init_fn, "a function of the worker's id, or None")
        checked: dict[str, int] = {
            name: options.flag(name, getattr(self, name)) for name in ("persistent_workers", "pin_memory")
        }
        if self.prefetch_factor is not None:
            checked["prefetch_factor"] = options.integer("prefetch_factor", self.prefetch_factor, 1, 1 << 16)
        checked["max_restarts"] = options.integer("max_restarts", self.max_restarts, 0)
        vars(self).update(checked, timeout=options.seconds("timeout", self.timeout))
        if not self.num_workers:
            for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context"):
                if given := getattr(self, name):
                    raise ValueError(f"{name} is {shorten(given)}, and num_workers is 0; pass num_workers=1 or more")
        if self.worker_method == "thread":
            self._check_for_threads()
        if self.worker_method == "ray":
            self._check_for_ray()
        elif self.ray_remote_args is not None:
            raise ValueError(f'ray_remote_args is {shorten(self.ray_remote_args)}, and needs worker_method="ray"')

    def _check_for_threads(self) -> None:
        for name, default, why in (
            ("multiprocessing_context", None, "starts no process"),
            ("max_restarts", 0, "has no workers that die alone; for broken streams use retries="),
        ):
            if (given := getattr(self, name)) != default:
                raise ValueError(f'{name} is {shorten(given)}, and worker_method="thread" {why}; leave it out')

    def _check_for_ray(self) -> None:
        if (context := self.multiprocessing_context) is not None:
            what = f"multiprocessing_context is {shorten(context)}"
            raise ValueError(f'{what}, and worker_method="ray" starts tasks of Ray; leave it out')
        given = self.ray_remote_args
        if given is not None and not isinstance(given, Mapping):
            raise TypeError(
                f"ray_remote_args is {shorten(given)}, and must be a dict of options of ray.remote, such as "
                '{"num_cpus": 2}'
            )
        if own := sorted(_OWN_RAY_ARGS & set(given or ())):
            raise ValueError(f"ray_remote_args has {own[0]}, which the loader sets itself; leave it out")


def check_dataset(dataset: Any) -> Any:
    """Return `dataset` if a loader can read it; raise a TypeError if not."""
    if not isinstance(dataset, StreamDataset):
        raise TypeError(
            f"dataset must be a StreamDataset, and is a {type(dataset).__name__}; sources go into "
            "StreamDataset(sources, open_stream, batch_size), Hugging Face's datasets into stores.open, and several "
            "StreamDatasets into interleave([...])"
        )
    return dataset
