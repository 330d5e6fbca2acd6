"""Exchange of values between ranks, through the key-value store that torch.distributed was started with.

Guarantee: a wait for another rank ends within `patience` seconds, with an error that names the rank.
"""

from __future__ import annotations

import threading
import time as clock
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist

from stream_dataloader._engine.ranks import keys
from stream_dataloader._engine.ranks.own_rank import RankInfo
from stream_dataloader._engine.workers.torch_quirks import bare_store
from stream_dataloader.errors import RankError

if TYPE_CHECKING or dist.is_available():  # some builds of torch have none of it
    from torch.distributed import FileStore  # type: ignore[attr-defined]
    from torch.distributed.distributed_c10d import PrefixStore, Store

_POLL_SECONDS = 0.05
_LIVENESS_SECONDS = 1.0
_LOOKS_A_SECOND = 1e4  # at each other, by all waiting ranks together
_QUIET_SECONDS = 5.0  # first wait in one go, which is short as torch logs a warning if it ends without the key


class StoreUse:
    """This process's use of one store of torch.distributed. It does not hold the store, and is dropped with it.

    Idle connections are kept, as opening one is slow if resolving the host's name is.
    """

    def __init__(self) -> None:
        self.idle: list[Store] = []  # working connections for the next thread that needs one
        self.past: dict[str, deque[set[str]]] = {}  # the keys of epochs that are over here, by peers
        self.lock = threading.Lock()  # guards the fields below
        self.calls: dict[str, dict[str, Any]] = {}  # calls without an answer: nonce and epoch, by peers
        self.hosts: list[Any] = []  # to epochs that this rank begins


_uses: weakref.WeakKeyDictionary[Store, StoreUse] = weakref.WeakKeyDictionary()


def use_of(store: Store) -> StoreUse:
    """Return this process's use of a store."""
    return _uses.setdefault(store, StoreUse())


def _can_be_cloned(store: Any) -> bool:
    """Return whether a store can have further connections.

    They exist since torch 2.8. A `FileStore` counts each as another process that shares the file, so it is excluded.
    """
    return hasattr(store, "clone") and not isinstance(bare_store(store), FileStore)


class StoreConnection:
    """One thread's connection to the store, with a prefix for all keys.

    Args:
        written: The full name of each key that is set is added to this set.
    """

    def __init__(self, store: Store, prefix: str, patience: float, own: RankInfo, written: set[str]) -> None:
        # Without a connection of its own, this thread shares that of the training, which a wait would block.
        self._own = _can_be_cloned(store)
        self.use = use_of(store)
        self._bare = store
        if self._own:
            try:
                self._bare = self.use.idle.pop()
            except IndexError:
                self._bare = cast(Any, store).clone()
        self.move(prefix)
        self.patience = patience
        self._info = own
        self._written = written
        self.closed = threading.Event()
        self.heard = clock.monotonic()  # the time of the store's last answer

    def move(self, prefix: str) -> None:
        self._prefix = prefix
        self.store = self.under(prefix)

    def under(self, prefix: str) -> Store:
        return PrefixStore(prefix, self._bare)

    def give_back(self) -> None:
        """Return the connection for reuse; its last call must have succeeded."""
        if self._own:
            self.use.idle.append(self._bare)

    def has(self, key: str) -> bool:
        found = bool(self.store.check([key]))
        self.heard = clock.monotonic()
        return found

    def text(self, key: str) -> str:
        return bytes(self.store.get(key)).decode()

    def note(self, *written: str) -> None:
        """Note that keys are set, by any rank."""
        self._written.update(f"{self._prefix}/{key}" for key in written)

    def put(self, key: str, value: str) -> None:
        self.note(key)
        self.store.set(key, value)

    def put_first(self, key: str, value: str) -> str:
        """Set a key unless a rank has set it; return its value."""
        self.note(key)
        return bytes(self.store.compare_set(key, "", value)).decode()

    def count(self, what: str) -> int:
        """Count this rank in, and return the count; 0 if a process of the same rank has done so before."""
        own = keys.of_rank(what, self._info.rank)
        self.note(own, what)
        return int(self.store.add(what, 1)) if self.store.add(own, 1) == 1 else 0

    def forget(self, *old: str) -> None:
        """Delete keys, if this rank has set them."""
        mine = self._written & {f"{self._prefix}/{key}" for key in old}
        self.delete(mine)
        self._written -= mine

    def delete(self, keys: Iterable[str]) -> None:
        """Delete keys, given without a prefix."""
        for key in keys:
            self._bare.delete_key(key)
            self.heard = clock.monotonic()

    def wait_long(self, key: str, seconds: float) -> bool:
        deadline = clock.monotonic() + seconds
        if self._own:
            try:
                self.store.wait([key], timedelta(seconds=seconds))
            except RuntimeError:  # the time is over, or the connection is broken, which the next call raises
                return self.has(key)
            return True
        while not (found := self.has(key)) and clock.monotonic() < deadline and not self.closed.is_set():
            self.closed.wait(_POLL_SECONDS / 10)
        return found

    def wait(
        self,
        key: str,
        purpose: str,
        counted: str | None = None,
        meanwhile: Callable[[StoreConnection], object] | None = None,
    ) -> str:
        """Wait for a key that rank 0 sets, or that is set once all ranks are `counted`, and return its value.

        Args:
            purpose: What the missing ranks should do, for the error.
            meanwhile: Called repeatedly during the wait.

        Raises:
            RankError: A rank that is waited for has left, or none of them made progress for `patience` seconds.
        """
        begin = since = clock.monotonic()
        if meanwhile is None and self.wait_long(key, min(_QUIET_SECONDS, self.patience / 2)):
            return self.text(key)
        progress: Any = None
        looked = begin
        every = max(min(_LIVENESS_SECONDS, self.patience / 4), self._info.world_size**2 / _LOOKS_A_SECOND)
        while not self.has(key):
            if self.closed.is_set():
                raise RankError("the iteration was closed while it waited for other ranks")
            if meanwhile is not None:
                meanwhile(self)
            now = clock.monotonic()
            if now - looked >= every or now - since > self.patience:
                looked, ranks = now, [0] if counted is None else self._lacking(counted)
                left = next((rank for rank in ranks if self.has(keys.of_rank(keys.LEFT, rank))), None)
                if left is not None and not self.has(key):
                    keys.checked(self.text(keys.of_rank(keys.LEFT, left)))
                seen = [self._progress_of(rank) for rank in ranks]
                if seen != progress and progress is not None:
                    since = now
                progress = seen
                if now - since > self.patience and not self.has(key):
                    message = _silence_message(ranks, self.patience, purpose)
                    raise RankError(message, ranks or range(self._info.world_size))
            self.closed.wait(min(_POLL_SECONDS, (now - begin) / 10 + _POLL_SECONDS / 50))
        return self.text(key)

    def _lacking(self, what: str) -> list[int]:
        """List the ranks that have not counted themselves in."""
        return [rank for rank in range(self._info.world_size) if not self.has(keys.of_rank(what, rank))]

    def _progress_of(self, rank: int) -> tuple[int, str]:
        """Return a rank with its current step, as text; empty before the rank has told it."""
        key = keys.of_rank(keys.AT, rank)
        return rank, self.text(key) if self.has(key) else ""


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _silence_message(ranks: Sequence[int], patience: float, purpose: str) -> str:
    if not ranks:
        what = f"all ranks did {purpose}, but this rank was not told within {patience:g} s"
        return f"{what}: the last one ended at that moment, or the network is slow; see all logs"
    what = f"{_named(ranks)} did not {purpose} within {patience:g} s"
    return f"{what}: dead, stuck, out of reach, or not iterating; see its log, or pass a longer timeout="
