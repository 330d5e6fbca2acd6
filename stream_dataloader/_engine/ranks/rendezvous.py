"""Rendezvous of ranks at an epoch's beginning: they find each other, and check that they are about to read the same.

::

    rank 1     call/1 = [[nonce, ...]], calls + 1                    waits for answer/<nonce>
    rank 0                     begins; sees that `calls` has changed:           answer/<nonce> = name

They meet under a name that no earlier epoch or ended rank has used: a call carries a nonce, which only a living rank 0
can answer.

Guarantee: the epoch begins on all ranks, or an error says which rank differs, or did not arrive.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time as clock
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from stream_dataloader._engine.ranks import keys
from stream_dataloader._engine.ranks.own_rank import RankInfo
from stream_dataloader._engine.ranks.store import StoreConnection, StoreUse, use_of
from stream_dataloader._engine.ranks.store_thread import SHUTDOWN_SECONDS, StoreThread
from stream_dataloader.errors import RankError, shorten

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_LOOK_SECONDS = 0.005
_KEPT_EPOCHS = 2  # another rank may lag behind
_GRACE_SECONDS = 5.0  # for the same epoch to begin in another thread, before ranks with different epochs raise an error


class Wanted(NamedTuple):
    """The epoch that a rank is about to begin.

    Attributes:
        label: The same for the same epoch.
        in_main: Whether the main thread begins it; otherwise the rank may begin another one in another thread.
    """

    label: str
    in_main: bool


def ask_for_name(connection: StoreConnection, own: RankInfo, wanted: Wanted, purpose: str) -> str:
    """Ask rank 0 for the name under which it begins the epoch; raise a `RankError` if it begins none."""
    nonce, use = uuid.uuid4().hex, connection.use
    connection.move(prefix_of(own.peers))
    calls = use.calls.setdefault(own.peers, {})

    def say(change: Callable[[], object]) -> None:
        """Change this rank's open calls, of all threads, and show them to rank 0."""
        with use.lock:
            change()
            listed = json.dumps([(nonce, *wanted) for nonce, wanted in calls.items()])
            connection.store.set(keys.of_rank(keys.CALL, own.rank), listed)
        connection.store.add(keys.CALLS, 1)

    say(lambda: calls.update({nonce: wanted}))
    try:
        name = connection.wait(keys.answer(nonce), purpose)
    finally:
        say(lambda: calls.pop(nonce))
    connection.store.delete_key(keys.answer(nonce))
    return name


class RendezvousHost:
    """Rank 0's side: answers the calls of other ranks while this context is open."""

    def __init__(self, use: StoreUse, own: RankInfo, wanted: Wanted) -> None:
        self._prefix = prefix_of(own.peers)
        self.name = f"{self._prefix}/{uuid.uuid4().hex}"
        self._use = use
        self._own = own
        self._wanted = wanted
        self.written: set[str] = set()  # the keys of answers, which may stay unread
        self._heard: int | None = None  # number of changes of calls that were looked at; None: look again
        self._here: set[int] = {own.rank}
        self._since = clock.monotonic()

    def __enter__(self) -> RendezvousHost:
        with self._use.lock:
            self._use.hosts.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        with self._use.lock:
            self._use.hosts.remove(self)

    def answer(self, connection: StoreConnection) -> None:
        """Answer new calls; a waiting rank does this between two looks at the store."""
        known = connection.under(self._prefix)
        heard = int(known.add(keys.CALLS, 0))
        if heard == self._heard:
            return
        self._heard = heard
        for rank in range(self._own.world_size):
            if rank not in self._here and connection.has(keys.of_rank(keys.HERE, rank)):
                self._here.add(rank)
            if rank in self._here or not known.check([keys.of_rank(keys.CALL, rank)]):
                continue
            for nonce, *wanted in json.loads(known.get(keys.of_rank(keys.CALL, rank))):
                if self._accepts(Wanted(*wanted)):
                    known.compare_set(keys.answer(nonce), "", self.name)
                    self.written.add(f"{self._prefix}/{keys.answer(nonce)}")
                else:
                    self._heard = None

    def _accepts(self, other: Wanted) -> bool:
        """Return whether a caller belongs here, or cannot belong anywhere else, so that it gets the error here."""
        if other.label == self._wanted.label:
            return True
        with self._use.lock:
            if any(another._wanted.label == other.label for another in self._use.hosts):
                return False
        return (other.in_main and self._wanted.in_main) or clock.monotonic() - self._since > _GRACE_SECONDS


def prefix_of(peers: str) -> str:
    """Return the prefix that ranks know beforehand; it is a new one each time that an agent starts them."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if os.environ.get("GROUP_WORLD_SIZE") == "1" else "0"
    return f"stream_dataloader/{peers}/{attempt}"


class Rendezvous:
    """An epoch that the ranks begin together.

    Args:
        purpose: What the ranks are about to do, for errors.
    """

    def __init__(self, own: RankInfo, store: Store, patience: float, purpose: str = "begin the epoch") -> None:
        self.own = own
        self._purpose = purpose
        self._patience = patience
        self._store: Any = store
        self._name = ""  # the prefix of all its keys, once rank 0 has chosen one
        self._keeps_store = dist.get_rank() == 0
        self.written: set[str] = set()  # full names of keys that this rank has set
        self.store_thread = StoreThread(self.connect)  # for the main thread

    @property
    def connect(self) -> Callable[[], StoreConnection]:
        return partial(StoreConnection, self._store, self._name, self._patience, self.own, self.written)

    def ask(self, task: Callable[[StoreConnection], Any]) -> Any:
        """Run a task on the main thread's connection; see `StoreThread.call`."""
        return self.store_thread.call(task, self._patience)

    def begin(self, terms: Mapping[str, Any], told: str = "") -> list[str]:
        """Wait for all ranks, and check that they are about to read the same.

        Args:
            terms: What must be the same on all ranks.
            told: A value for all ranks; either all of them have one, or none.

        Returns:
            The values of all ranks, in order of rank.
        """
        label = hashlib.blake2b(json.dumps(terms, sort_keys=True).encode(), digest_size=8).hexdigest()
        wanted = Wanted(label, threading.current_thread() is threading.main_thread())
        try:
            found: list[str] = self.ask(partial(self._meet, terms, told, wanted))
        except BaseException as error:
            self._give_up(error)
            raise
        past = use_of(self._store).past.setdefault(self.own.peers, deque())
        while len(past) > _KEPT_EPOCHS:
            self.store_thread.post(partial(StoreConnection.delete, keys=list(past.popleft())))
        return found

    def _meet(self, terms: Mapping[str, Any], told: str, wanted: Wanted, connection: StoreConnection) -> list[str]:
        """Find the other ranks, and begin with them."""
        if self.own.rank:
            self._name = ask_for_name(connection, self.own, wanted, self._purpose)
            connection.move(self._name)
            return self._begin(terms, told, connection)
        with RendezvousHost(connection.use, self.own, wanted) as host:
            self._name = host.name
            connection.move(self._name)
            try:
                return self._begin(terms, told, connection, host.answer)
            finally:
                self.written |= host.written

    def _begin(
        self,
        terms: Mapping[str, Any],
        told: str,
        connection: StoreConnection,
        meanwhile: Callable[[StoreConnection], object] | None = None,
    ) -> list[str]:
        """Begin under the common name; `meanwhile` is called during waits, to let others arrive."""
        rank, mine = self.own.rank, json.dumps(terms)
        connection.note(keys.TERMS, keys.DIFFERS, keys.TOLD, keys.READY)  # noted on each rank, as any may set them
        if rank == 0:
            first = json.loads(connection.put_first(keys.TERMS, mine))
        else:
            first = json.loads(connection.wait(keys.TERMS, self._purpose))
        difference = _difference(rank, json.loads(mine), first)
        # This must come before the rank is counted, because the last rank to arrive looks for it.
        if difference:
            connection.put_first(keys.DIFFERS, keys.pack(RankError(difference, [rank])))
        if told:
            connection.put(keys.of_rank(keys.TOLD, rank), told)
        if connection.count(keys.HERE) == self.own.world_size:  # the first difference is the error of all ranks
            differs = connection.text(keys.DIFFERS) if connection.has(keys.DIFFERS) else keys.YES
            if told and differs == keys.YES:  # the last rank collects the values, so that others have one to read
                own = [connection.text(keys.of_rank(keys.TOLD, each)) for each in range(self.own.world_size)]
                connection.put(keys.TOLD, json.dumps(own))
            connection.put_first(keys.READY, differs)
        ready = connection.wait(keys.READY, self._purpose, keys.HERE, meanwhile)
        found: list[str] = json.loads(connection.text(keys.TOLD)) if told and ready == keys.YES else []
        self.part(connection, keys.BEGUN, stays=ready == keys.YES)
        keys.checked(ready)
        if difference:
            raise RankError(difference, [rank])
        return found

    def part(self, connection: StoreConnection, what: str, *, stays: bool = True) -> None:
        """Note that this rank has read all it needs; the process that keeps the store waits until all have."""
        if connection.count(what) == self.own.world_size:
            connection.put(keys.all_of(what), "")
        elif self._keeps_store and stays:
            with contextlib.suppress(RankError):  # a rank that died or is stuck needs the store no more
                connection.wait(keys.all_of(what), "end", what)

    def wait_until_read(self, connection: StoreConnection, came: str, *parted: str) -> None:
        """Wait a moment, so that other ranks can read the error when an epoch ends early."""
        deadline = clock.monotonic() + SHUTDOWN_SECONDS / 2
        others = {rank for rank in range(self.own.world_size) if rank != self.own.rank and self._keeps_store}
        while others and clock.monotonic() < deadline:
            rank = min(others)
            has_come = connection.has(keys.of_rank(came, rank))
            if not has_come or any(connection.has(keys.of_rank(what, rank)) for what in parted):
                others.remove(rank)
            else:
                clock.sleep(_LOOK_SECONDS)

    def _give_up(self, error: BaseException) -> None:
        rank = self.own.rank
        reported = RankError(f"rank {rank} left before the epoch began; see its log", [rank])
        if isinstance(error, RankError):
            reported = error
        if not self._name or not reported.ranks:  # no other rank was met yet, or the store is out of reach
            return
        reason = keys.pack(reported)

        def leave(connection: StoreConnection) -> None:
            connection.put(keys.of_rank(keys.LEFT, rank), reason)
            connection.put_first(keys.READY, reason)
            self.wait_until_read(connection, keys.HERE, keys.BEGUN, keys.LEFT)

        # After an interrupt the thread still has a task, so it could not take another one in time.
        self.report_and_close(leave, busy=not isinstance(error, RankError))

    def report_and_close(self, task: Callable[[StoreConnection], Any], *, busy: bool) -> None:
        thread = StoreThread(self.connect) if busy else self.store_thread
        with contextlib.suppress(RankError):
            thread.call(task, SHUTDOWN_SECONDS, 0)
        thread.close()

    def close(self) -> None:
        self.store_thread.close()
        if self._store is not None:
            # The set itself is kept, not a copy, because the listener may still add keys to it.
            use_of(self._store).past.setdefault(self.own.peers, deque()).append(self.written)
            self._store = None  # so that the store can go when its process group is destroyed


def _difference(rank: int, mine: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """Describe the first difference of a rank from rank 0; empty if they are alike."""
    for name in mine:
        if mine[name] != first.get(name):
            what = f"rank {rank} has {name} {shorten(mine[name], 80)}, and rank 0 {shorten(first.get(name), 80)}"
            return f"{what}; build the same loaders on all ranks, and iterate over them as often, in the same order"
    return ""
