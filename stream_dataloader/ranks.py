"""The ranks that share a loader's epochs: begin them together, and know how their end is to be found.

Guarantee: ranks take the same way to the end, as that follows from what they compared at the beginning.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch.distributed.distributed_c10d import Store

from stream_dataloader.agreement import AgreedSteps, CountedSteps, OwnSteps, Steps
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.distributed import Place, number_of_next, patience_of
from stream_dataloader.schedule import count_steps
from stream_dataloader.session import Session


class Ranks:
    """The ranks that share a loader's epochs.

    Args:
        timeout: Seconds to wait for one of them; 0: as long as the store of torch.distributed waits.

    Attributes:
        place: This process's among them.
    """

    def __init__(self, timeout: float) -> None:
        self.place = Place()
        self._timeout = timeout
        self._store: Store | None = None
        self._number = self._sessions = 0
        self._past: list[Session] = []

    def begin(self, dataset: StreamDataset, epoch: int, step: int, told: Mapping[str, Any]) -> Steps:
        """Begin an epoch together with all other ranks.

        Args:
            dataset: What this rank reads.
            epoch: The epoch's number.
            step: The first step.
            told: What must be alike on all ranks.

        Raises:
            RankError: It is not, or a rank did not come.
        """
        place, rules = self.place, dataset.rules
        if place.world_size == 1:
            return OwnSteps()
        count = _count(dataset, epoch, step, place)
        decided = OwnSteps() if rules.padding_mode == "cycle" else None if count is None else CountedSteps(count)
        if place.store is None:
            if decided is None:
                warnings.warn(
                    "ranks cannot agree on the number of steps without torch.distributed; call init_process_group(), "
                    "or pass lengths= to StreamDataset",
                    stacklevel=5,
                )
            return decided or OwnSteps()
        session = self._next_session()
        try:
            session.begin({**told, "number of batches": count})
            if len(self._past) > 2:  # a process that is the same rank as another may lag behind
                session.sweep(self._past.pop(0))
        except BaseException:
            session.close()
            raise
        if decided is None:
            return AgreedSteps(session, every=rules.padding_mode == "drop", step=step)
        session.close()
        return decided

    def _next_session(self) -> Session:
        place, store = self.place, self.place.store
        assert store is not None
        if self._store is not store:
            self._store, self._number, self._sessions, self._past = store, number_of_next(place), 0, []
        self._sessions += 1
        patience = self._timeout or patience_of(store)
        session = Session(place, f"{place.peers}/{self._number}/{self._sessions}", patience)
        self._past.append(session)
        return session


def _count(dataset: StreamDataset, epoch: int, step: int, place: Place) -> int | None:
    """The number of steps of the epoch, where it is known and all ranks can make do with it."""
    rules = dataset.rules
    if dataset.lengths is None or rules.padding_mode == "cycle" or not rules.deterministic:
        return None
    if (dataset.lengths < 0).any() or dataset.on_error != "raise":  # a stream that is skipped changes it
        return None
    steps = dataset.steps_of_groups(epoch)
    count = count_steps(rules, steps)
    of_ranks = [max(steps[i : i + rules.groups.count]) for i in range(0, len(steps), rules.groups.count)]
    if place.store is not None and rules.padding_mode != "drop" and min(of_ranks) <= step < count:
        return None  # a rank that reads nothing does not know the items' layout: it has to ask
    return count
