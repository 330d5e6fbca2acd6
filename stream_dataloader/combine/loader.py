"""`JointLoader`: the loader that `side_by_side` returns, a loader of loaders.

::

    member 0: whole videos     its own loader   lanes 0, 1     its own workers, order, resume
    member 1: random windows   its own loader   lanes 2, 3     the same
    the batch                                   lanes 0 ... 3  joined: one copy of each batch

Guarantees: each member's lanes are bit for bit the same as when it is read alone, so all promises of `StreamDataLoader`
hold for them. A state describes all members after the same batch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from stream_dataloader._engine import options
from stream_dataloader._engine.advice import available_cores
from stream_dataloader._engine.device import Destination
from stream_dataloader._engine.loader.attributes import KeptLength
from stream_dataloader._engine.reading.deferred import Deferred, Turn
from stream_dataloader._engine.workers.pool import warn_of_cores
from stream_dataloader._engine.workers.settings import WorkerSettings
from stream_dataloader.batch import StreamBatch
from stream_dataloader.combine.dataset import SideBySide
from stream_dataloader.combine.join import Join, sides_of
from stream_dataloader.combine.position import JointPosition
from stream_dataloader.combine.reading import JointStarter, Member, shifted
from stream_dataloader.dataloader import StreamDataLoader

#: Options that a member without workers must not get.
_OF_WORKERS = ("prefetch_factor", "persistent_workers", "multiprocessing_context")
_OF_RANKS = ("virtual_ranks", "rank", "world_size", "process_group")


class JointLoader(StreamDataLoader[Any]):
    """Reads several datasets in the lanes of one batch; see `side_by_side`.

    Args:
        dataset: The members, each with its lanes.
        num_workers: Number of workers of each member, or one number that is split by lanes.
        batches_per_epoch: Number of batches of an epoch, if all members are endless.
        loader_options: As for `StreamDataLoader`.
    """

    def __init__(  # does not call the base's, whose arguments are those of a single dataset
        self,
        dataset: SideBySide,
        num_workers: int | Sequence[int],
        batches_per_epoch: int | None,
        loader_options: dict[str, Any],
    ) -> None:
        self.dataset: Any = dataset
        workers = _workers_of(num_workers, [member.batch_size for member in dataset.members])
        self.num_workers = sum(workers)
        self.collate_fn = loader_options.pop("collate_fn", None)
        if self.collate_fn is not None:
            options.check_callable("collate_fn", self.collate_fn, "a function of the list of windows, or None")
        device = loader_options.pop("device", None)
        of_ranks = {name: loader_options.pop(name) for name in _OF_RANKS if name in loader_options}
        self._settings = WorkerSettings(num_workers=self.num_workers, **(_DEFAULTS | loader_options))
        self._destination = Destination(device, self._settings.pin_memory)
        self._batches_per_epoch = options.batches_per_epoch(batches_per_epoch, "cycle")
        sides = sides_of([own.batch_size for own in dataset.members], workers, [own.sources for own in dataset.members])
        self._members = []
        for member, side, count in zip(dataset.members, sides, workers, strict=True):
            own = {name: value for name, value in loader_options.items() if count or name not in _OF_WORKERS}
            # Only the joined batch is pinned. Pinning members' batches first would copy everything twice.
            own |= {"pin_memory": False, "worker_init_fn": shifted(own.get("worker_init_fn"), side.first_worker)}
            loader = StreamDataLoader(member, count, **own, **of_ranks)
            self._members.append(Member(side, loader, member._is_endless))
        time_steps, context = dataset.members[0]._window_steps, dataset.members[0].context
        assert time_steps is not None
        if self._settings.worker_method == "process" and max(workers) <= available_cores():
            warn_of_cores(self.num_workers)  # if one member alone has too many workers, its own loader has warned
        self._join = Join(
            sides,
            time_steps,
            [member.fill_value for member in dataset.members],
            mark_ends=all(member.mark_ends for member in dataset.members),
            context=context,
        )
        loaders = [member.loader for member in self._members]
        self._ranks = loaders[0]._ranks  # the ranks are the same for all members
        self._position: Any = JointPosition(dataset, loaders, self._batches_per_epoch)
        self._start_anew()
        self._kept_length = KeptLength()

    def _start_anew(self) -> None:
        self._turn = Turn()
        self._starter: Any = JointStarter(self._members, self._join, self._settings, self._turn)

    def parts(self) -> Iterator[StreamBatch]:
        """Read the next epoch without regrouping: iterate over each worker's parts, step after step."""
        return Deferred(functools.partial(self._begin, None, parts=True), self._turn)

    @property
    def _endless_or_sources(self) -> int | None:
        members = self.dataset.members
        return None if any(self.dataset.endless) else sum(len(member.sources) for member in members)

    def _find_rank(self) -> None:
        """Find this rank, which may be known only now, and adopt its rules."""
        before = self._ranks._info
        for member in self._members:
            member.loader._find_rank()
        if self._ranks._info != before:
            self._starter.end()
            self._position.forget_place()
            if self._position.loaded is not None:
                self.load_state_dict(*self._position.loaded)


_DEFAULTS: dict[str, Any] = {
    "prefetch_factor": None,
    "persistent_workers": False,
    "multiprocessing_context": None,
    "worker_init_fn": None,
    "timeout": 0,
    "pin_memory": False,
    "max_restarts": 0,
    "worker_method": "process",
}


def _workers_of(given: Any, lanes: Sequence[int]) -> list[int]:
    """Return the number of workers of each member: as given, or one number split by lanes."""
    if isinstance(given, Sequence):
        if len(given) != len(lanes):
            raise ValueError(f"num_workers has {len(given)} numbers, and there are {len(lanes)} members; pass one each")
        return [options.num_workers(number, own) for number, own in zip(given, lanes, strict=True)]
    count = options.integer("num_workers", given, 0)
    return [min(own, max(1, round(count * own / sum(lanes)))) if count else 0 for own in lanes]
