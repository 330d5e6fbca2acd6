"""What else torch's `DataLoader` has and trainers ask for: answered where it is true here.

Guarantee: what does not exist here is an `AttributeError` that says what to do instead.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import sys
import warnings
from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import Any, NoReturn

from stream_dataloader._loader.starter import Starter
from stream_dataloader._workers.settings import WorkerSettings
from stream_dataloader.protocols import WorkerMethod


class _Absent:
    """An attribute that torch's `DataLoader` has and this one has not, and why."""

    def __init__(self, reason: str) -> None:
        self._reason = reason
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, loader: object, owner: type) -> NoReturn:
        raise AttributeError(f"{owner.__name__} has no {self._name}: {self._reason}")


_NO_INDICES = (
    "it reads streams, not samples by index; the dataset's shuffle=, schedule= and seed= say which, set_epoch(e) when"
)
_REBUILDS = (
    "who asks for it (accelerate) would build a torch DataLoader anew: use integrations.accelerate.prepare. To skip "
    'batches: skip(n), load_state_dict(); whether an epoch ends at the first idle lane is padding_mode="drop"'
)


class TorchAttributes:
    """Attributes of torch's `DataLoader`, for a loader with settings and a number of workers."""

    num_workers: int
    _settings: WorkerSettings
    _starter: Starter

    sampler = _Absent(_NO_INDICES)  # None would be taken for a sampler that shuffles, by Lightning's overfit_batches
    batch_sampler = _Absent(_NO_INDICES)  # of None, Lightning's DeepSpeed strategy would read the batch_size
    drop_last = _Absent(_REBUILDS)

    @property
    def prefetch_factor(self) -> int | None:
        """Number of messages that workers read ahead; None without workers."""
        return self._settings.batches_ahead if self.num_workers else None

    @property
    def pin_memory(self) -> bool:
        """Batches are put into page-locked memory."""
        return self._settings.pin_memory

    @property
    def persistent_workers(self) -> bool:
        """Workers are kept from one epoch to the next."""
        return self._settings.persistent_workers

    @property
    def multiprocessing_context(self) -> BaseContext | None:
        """How workers are started; None is Python's default."""
        context = self._settings.multiprocessing_context
        return multiprocessing.get_context(context) if isinstance(context, str) else context

    @property
    def worker_method(self) -> WorkerMethod:
        """What workers are: `"process"` or `"thread"`."""
        return self._settings.worker_method

    @property
    def worker_init_fn(self) -> Callable[[int], Any] | None:
        """Called in each worker when it starts, with its id; may be set, for the next iteration."""
        return self._settings.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, function: Callable[[int], Any] | None) -> None:
        self._renew(worker_init_fn=function)

    def _renew(self, **changed: Any) -> None:
        """Have workers of other settings for the next iteration."""
        self._settings = dataclasses.replace(self._settings, **changed)
        self._starter.renew(self._settings)

    @property
    def timeout(self) -> float:
        """Seconds to wait for a worker or another rank; 0 has no limit for workers."""
        return self._settings.timeout

    @property
    def generator(self) -> None:
        """None: whatever is random follows from the dataset's seed."""
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

    It looks at who asks: at the names of two modules.
    """

    def __init__(self) -> None:
        self._kept: int | None = None
        self._warned = False

    def renewed(self) -> None:
        """Lightning will know the length of the coming epoch."""
        self._kept = None

    def asked(self, epoch: int, count: int) -> None:
        """A loader's `__len__` was called, which answers `count` for an epoch."""
        if "lightning" not in sys.modules and "pytorch_lightning" not in sys.modules:
            return
        asking = _module(3)
        if asking in _KEEPING:
            self._kept = count
        elif self._kept not in (None, count) and not self._warned and _module(4) == _LIMITING:
            self._warned = True
            warnings.warn(
                f"Lightning keeps the length of the epoch that it asked for first, {self._kept} batches, and epoch "
                f"{epoch} has {count}. It cuts longer epochs, and does not validate after shorter ones. Add "
                "stream_dataloader.integrations.lightning.StreamEpochs() to the trainer's callbacks",
                RuntimeWarning,
                stacklevel=3,
            )


def _module(depth: int) -> str:
    """The module of a caller, under the name that Lightning's two packages have in common."""
    try:
        name: str = sys._getframe(depth).f_globals.get("__name__", "")
    except ValueError:  # there are not so many
        return ""
    return name.replace("pytorch_lightning.", "lightning.").replace("lightning.pytorch.", "lightning.")
