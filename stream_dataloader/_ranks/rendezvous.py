"""An epoch that several ranks begin together, once they know that they are about to read the same.

Guarantee: on all ranks the epoch begins, or an error says which rank differs and in what, or which one did not come.
"""

from __future__ import annotations

import contextlib
import json
import time as clock
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from stream_dataloader._ranks import keys
from stream_dataloader._ranks.meeting import Invitation, Wanted, ask_for_name
from stream_dataloader._ranks.place import RankPlace
from stream_dataloader._ranks.store import FAREWELL_SECONDS, StoreConnection, StoreThread, use_of
from stream_dataloader.errors import RankError, shorten

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_LOOK_SECONDS = 0.005
_KEPT_EPOCHS = 2  # a process that is the same rank as another may lag behind


class Rendezvous:
    """An epoch that the ranks begin together.

    Args:
        place: This rank's.
        store: Through which ranks speak.
        name: The prefix of all keys, alike on all ranks; None: rank 0 chooses one.
        patience: Seconds to wait for another rank.
    """

    def __init__(self, place: RankPlace, store: Store, name: str | None, patience: float) -> None:
        self.place = place
        self.patience = patience
        self._store: Store | None = store
        self._name = name or ""
        self._keeps_store = dist.get_rank() == 0
        self.written: set[str] = set()  # keys that this rank has set, in full
        self.speaker = StoreThread(self.connect)  # for the main thread

    @property
    def connect(self) -> Callable[[], StoreConnection]:
        """Opens a connection of this epoch's; also when that is over, for what is still to be said."""
        return partial(StoreConnection, self._open_store, self._name, self.patience, self.place.world_size)

    def ask(self, task: Callable[[StoreConnection], Any]) -> Any:
        """Have a task done on the main thread's connection; see `StoreThread.call`."""
        return self.speaker.call(task, self.patience)

    def put(self, connection: StoreConnection, key: str, value: str) -> None:
        """Set a key."""
        self._note(key)
        connection.store.set(key, value)

    def put_first(self, connection: StoreConnection, key: str, value: str) -> str:
        """Set a key, unless a rank has; what it is then."""
        self._note(key)
        return bytes(connection.store.compare_set(key, "", value)).decode()

    def count(self, connection: StoreConnection, what: str) -> int:
        """Count this rank in something, once even if several processes are this rank; 0 if it was counted before."""
        own = keys.of_rank(what, self.place.rank)
        self._note(own, what)
        return int(connection.store.add(what, 1)) if connection.store.add(own, 1) == 1 else 0

    def _note(self, *written: str) -> None:
        self.written.update(f"{self._name}/{key}" for key in written)

    def forget(self, connection: StoreConnection, *old: str) -> None:
        """Delete keys, if this rank has set them."""
        mine = self.written & {f"{self._name}/{key}" for key in old}
        connection.delete(mine)
        self.written -= mine

    def begin(self, terms: Mapping[str, Any]) -> None:
        """Wait for all ranks, and check that they are about to read the same."""
        try:
            self.ask(partial(self._meet, terms, Wanted.of(terms)))
        except BaseException as error:
            self._give_up(error)
            raise
        past = use_of(self._open_store).past.setdefault(self.place.peers, deque())
        while len(past) > _KEPT_EPOCHS:
            self.speaker.post(partial(StoreConnection.delete, keys=list(past.popleft())))

    @property
    def _open_store(self) -> Store:
        assert self._store is not None
        return self._store

    def _meet(self, terms: Mapping[str, Any], wanted: Wanted, connection: StoreConnection) -> None:
        """Find where the other ranks are, and begin there."""
        if self._name:
            self._begin(terms, connection)
        elif self.place.rank:
            self._name = ask_for_name(connection, self.place, wanted)
            connection.move(self._name)
            self._begin(terms, connection)
        else:
            with Invitation(connection.use, self.place, wanted) as invitation:
                self._name = invitation.name
                connection.move(self._name)
                try:
                    self._begin(terms, connection, invitation.answer)
                finally:
                    self.written |= invitation.written

    def _begin(
        self,
        terms: Mapping[str, Any],
        connection: StoreConnection,
        meanwhile: Callable[[StoreConnection], object] | None = None,
    ) -> None:
        """Begin under the name that ranks have met by; `meanwhile` lets others come."""
        rank, mine = self.place.rank, json.dumps(terms)
        self._note(keys.TERMS, keys.DIFFERS, keys.READY)  # whichever rank sets them
        if rank == 0:
            first = json.loads(self.put_first(connection, keys.TERMS, mine))
        else:
            first = json.loads(connection.wait(keys.TERMS, lambda: [0], "begin the epoch"))
        complaint = _complaint(rank, json.loads(mine), first)
        arrived = self.count(connection, keys.HERE)
        if not arrived and not terms["deterministic"]:
            complaint = complaint or (
                f"two processes are rank {rank}, and would not read the same with deterministic=False; leave it at True"
            )
        if complaint:
            self.put_first(connection, keys.DIFFERS, keys.pack(RankError(complaint, [rank])))
        if arrived == self.place.world_size:  # what the first to differ said holds for all
            differs = connection.text(keys.DIFFERS) if connection.has(keys.DIFFERS) else keys.YES
            self.put_first(connection, keys.READY, differs)
        missing = partial(self.lacking, connection, keys.HERE)
        ready = connection.wait(keys.READY, missing, "begin the epoch", meanwhile)
        self.part(connection, keys.BEGUN, stays=ready == keys.YES)
        keys.checked(ready)
        if complaint:
            raise RankError(complaint, [rank])

    def part(self, connection: StoreConnection, what: str, *, stays: bool = True) -> None:
        """Say that this rank has read what it needs; the process that keeps the store stays until all have.

        Else the store would end with it, before others that are slow have read the end of their epoch.
        """
        if self.count(connection, what) == self.place.world_size:
            self.put(connection, keys.all_of(what), "")
        elif self._keeps_store and stays:
            with contextlib.suppress(RankError):  # one that died or is stuck has no need of it
                connection.wait(keys.all_of(what), partial(self.lacking, connection, what), "end")

    def wait_until_read(self, connection: StoreConnection, came: str, *parted: str) -> None:
        """Where an epoch ends before its time, let others read why, for a moment."""
        deadline = clock.monotonic() + FAREWELL_SECONDS / 2
        others = {rank for rank in range(self.place.world_size) if rank != self.place.rank and self._keeps_store}
        while others and clock.monotonic() < deadline:
            rank = min(others)
            has_come = connection.has(keys.of_rank(came, rank))
            if not has_come or any(connection.has(keys.of_rank(what, rank)) for what in parted):
                others.remove(rank)
            else:
                clock.sleep(_LOOK_SECONDS)

    def _give_up(self, error: BaseException) -> None:
        """Let those that wait, and those that come later, know that the epoch does not begin."""
        rank = self.place.rank
        reported = RankError(f"rank {rank} left before the epoch began; see its log", [rank])
        if isinstance(error, RankError):
            reported = error
        if not self._name or not reported.ranks:  # nobody is met yet, or the store is out of reach
            return
        reason = keys.pack(reported)

        def leave(connection: StoreConnection) -> None:
            self.put(connection, keys.of_rank(keys.LEFT, rank), reason)
            self.put_first(connection, keys.READY, reason)
            self.wait_until_read(connection, keys.HERE, keys.BEGUN, keys.LEFT)

        self.say_last(leave, busy=not isinstance(error, RankError))  # it was interrupted

    def say_last(self, task: Callable[[StoreConnection], Any], *, busy: bool) -> None:
        """Have one more task done, if that is soon; on another connection if the main thread's is busy."""
        farewell = StoreThread(self.connect) if busy else self.speaker
        with contextlib.suppress(RankError):
            farewell.call(task, FAREWELL_SECONDS, 0)
        farewell.close()

    def lacking(self, connection: StoreConnection, what: str) -> list[int]:
        """The ranks that have not counted themselves in something."""
        return [rank for rank in range(self.place.world_size) if not connection.has(keys.of_rank(what, rank))]

    def close(self) -> None:
        """Nothing more is to be said."""
        self.speaker.close()
        if self._store is not None:
            # the set itself: its listener may still say its last
            use_of(self._store).past.setdefault(self.place.peers, deque()).append(self.written)
            self._store = None  # a group that ends takes its store along


def _complaint(rank: int, mine: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """What a rank has that rank 0 has not; empty if they are alike."""
    for name in mine:
        if mine[name] != first.get(name):
            return (
                f"rank {rank} has {name} {shorten(mine[name], 80)}, and rank 0 {shorten(first.get(name), 80)}; build "
                "dataset and loader alike on all ranks, and iterate over the same ones, as often, in the same order"
            )
    return ""
