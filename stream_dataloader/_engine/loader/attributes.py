"""Further attributes of torch's `DataLoader` that trainers look up, as far as they have a meaning here.

Guarantee: an attribute without a meaning here raises an `AttributeError` that says what to do instead.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import sys
import warnings
from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import Any, NoReturn

from stream_dataloader._engine.loader.starter import Starter
from stream_dataloader._engine.workers.settings import WorkerMethod, WorkerSettings


class _Absent:
    """An attribute of torch's `DataLoader` that does not exist here, with the reason."""

    def __init__(self, reason: str) -> None:
        self._reason = reason
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, loader: object, owner: type) -> NoReturn:
        raise AttributeError(f"{owner.__name__} has no {self._name}: {self._reason}")


_NO_INDICES = (
    "it reads streams, not samples by index; their order is set by the dataset's shuffle=, schedule= and seed=, and by "
    "set_epoch(e)"
)
_REBUILDS = (
    "accelerate reads it to build a torch DataLoader anew: use integrations.accelerate.prepare. To skip batches: "
    'skip(n), load_state_dict(); to end an epoch at the first idle lane: padding_mode="drop"'
)


class TorchAttributes:
    """Attributes of torch's `DataLoader`, for a loader with settings and a number of workers."""

    num_workers: int
    _settings: WorkerSettings
    _starter: Starter

    sampler = _Absent(_NO_INDICES)  # Lightning's overfit_batches would take None for a sampler that shuffles
    batch_sampler = _Absent(_NO_INDICES)  # Lightning's DeepSpeed strategy would read the batch_size of None
    drop_last = _Absent(_REBUILDS)

    @property
    def prefetch_factor(self) -> int | None:
        """Number of messages that workers read ahead; None without workers."""
        return self._settings.batches_ahead if self.num_workers else None

    @property
    def pin_memory(self) -> bool:
        """Whether batches are put into page-locked memory."""
        return self._settings.pin_memory

    @property
    def persistent_workers(self) -> bool:
        """Whether workers are kept from one epoch to the next."""
        return self._settings.persistent_workers

    @property
    def multiprocessing_context(self) -> BaseContext | None:
        """Context that starts the workers; None is Python's default."""
        context = self._settings.multiprocessing_context
        return multiprocessing.get_context(context) if isinstance(context, str) else context

    @property
    def worker_method(self) -> WorkerMethod:
        """Kind of the workers: `"process"`, `"thread"` or `"ray"`."""
        return self._settings.worker_method

    @property
    def worker_init_fn(self) -> Callable[[int], Any] | None:
        """Called in each worker when it starts, with its id; may be set, for the next iteration."""
        return self._settings.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, function: Callable[[int], Any] | None) -> None:
        self._renew(worker_init_fn=function)

    def _renew(self, **changed: Any) -> None:
        """Use workers with changed settings from the next iteration on."""
        self._settings = dataclasses.replace(self._settings, **changed)
        self._starter.renew(self._settings)

    @property
    def timeout(self) -> float:
        """Seconds to wait for a worker or another rank; 0 has no limit for workers."""
        return self._settings.timeout

    @property
    def generator(self) -> None:
        """None: all randomness follows from the dataset's seed."""
        return None

    @property
    def pin_memory_device(self) -> str:
        """Empty: memory is page-locked for the current accelerator."""
        return ""

    @property
    def in_order(self) -> bool:
        """True: batches come in order of their steps."""
        return True


_KEEPING = ("lightning.loops.fit_loop", "lightning.loops.evaluation_loop")
_LIMITING = "lightning.utilities.combined_loader"


class KeptLength:
    """Warns once when Lightning is about to cut an epoch by the length of another.

    It recognizes Lightning's calls of `__len__` by the names of the calling modules.
    """

    def __init__(self) -> None:
        self._kept: int | None = None
        self._warned = False

    def renewed(self) -> None:
        """Note that Lightning will learn the length of the coming epoch."""
        self._kept = None

    def asked(self, epoch: int, count: int) -> None:
        """Note that a loader's `__len__` was called, which returns `count` for an epoch."""
        if "lightning" not in sys.modules and "pytorch_lightning" not in sys.modules:
            return
        asking = _module(3)
        if asking in _KEEPING:
            self._kept = count
        elif self._kept not in (None, count) and not self._warned and _module(4) == _LIMITING:
            self._warned = True
            warnings.warn(
                f"Lightning keeps the length that it read first, {self._kept} batches, and epoch {epoch} has {count}. "
                "It cuts longer epochs, and does not validate after shorter ones. Add "
                "stream_dataloader.integrations.lightning.StreamEpochs() to the trainer's callbacks",
                RuntimeWarning,
                stacklevel=3,
            )


def _module(depth: int) -> str:
    """Return the name of a caller's module, in the form that Lightning's two packages have in common."""
    try:
        name: str = sys._getframe(depth).f_globals.get("__name__", "")
    except ValueError:  # the call stack is not that deep
        return ""
    return name.replace("pytorch_lightning.", "lightning.").replace("lightning.pytorch.", "lightning.")
