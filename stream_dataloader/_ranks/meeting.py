"""How the ranks that begin an epoch find each other: under a name that no earlier epoch or ended rank has used.

::

    rank 1     call/1 = [[nonce, ...]], calls + 1                    waits for answer/<nonce>
    rank 0                     begins; sees that `calls` has changed:           answer/<nonce> = name

The store may outlive the ranks: an agent keeps it, and starts ranks again. So a value in it does not prove that its
writer still lives. A call carries a nonce, which only a living rank 0 can answer, when it begins an epoch too. Epochs
are not counted: a rank that missed one, or had one more, meets the others in the next.

Guarantee: ranks meet if each of them begins an epoch; ranks that begin the same one in several threads meet in pairs.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time as clock
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from stream_dataloader._ranks import keys
from stream_dataloader._ranks.place import RankPlace
from stream_dataloader._ranks.store import StoreConnection, StoreUse, use_of

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_GRACE_SECONDS = 5.0  # for the same epoch to begin in another thread, before ranks that differ meet


class Wanted(NamedTuple):
    """Which epoch a rank is about to begin."""

    label: str  # the same for the same epoch
    in_main: bool  # the rank begins no other one meanwhile, in another thread

    @classmethod
    def of(cls, terms: Mapping[str, Any]) -> Wanted:
        """The epoch with these terms, begun by this thread."""
        whole = json.dumps(terms, sort_keys=True).encode()
        in_main = threading.current_thread() is threading.main_thread()
        return cls(hashlib.blake2b(whole, digest_size=8).hexdigest(), in_main)


def ask_for_name(connection: StoreConnection, place: RankPlace, wanted: Wanted) -> str:
    """Where rank 0 begins the epoch; `RankError` if it begins none."""
    nonce, use = uuid.uuid4().hex, connection.use
    connection.move(prefix_of(place.peers))
    calls = use.calls.setdefault(place.peers, {})

    def say(change: Callable[[], object]) -> None:
        """Change this rank's open calls, of all threads, and let rank 0 see them."""
        with use.lock:
            change()
            listed = json.dumps([(nonce, *wanted) for nonce, wanted in calls.items()])
            connection.store.set(keys.of_rank(keys.CALL, place.rank), listed)
        connection.store.add(keys.CALLS, 1)

    say(lambda: calls.update({nonce: wanted}))
    try:
        name = connection.wait(keys.answer(nonce), lambda: [0], "begin the epoch")
    finally:
        say(lambda: calls.pop(nonce))
    connection.store.delete_key(keys.answer(nonce))
    return name


class Invitation:
    """Rank 0's side: answers those that ask where to come, while this context is open."""

    def __init__(self, use: StoreUse, place: RankPlace, wanted: Wanted) -> None:
        self._prefix = prefix_of(place.peers)
        self.name = f"{self._prefix}/{uuid.uuid4().hex}"
        self._use = use
        self._place = place
        self._wanted = wanted
        self.written: set[str] = set()  # the keys of answers, which nobody may have read
        self._heard: int | None = None  # how often calls had changed when they were looked at; None: look again
        self._here: set[int] = {place.rank}
        self._since = clock.monotonic()

    def __enter__(self) -> Invitation:
        with self._use.lock:
            self._use.invitations.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        with self._use.lock:
            self._use.invitations.remove(self)

    def answer(self, connection: StoreConnection) -> None:
        """Answer new calls; a rank that waits does this between two looks at the store."""
        known = connection.under(self._prefix)
        heard = int(known.add(keys.CALLS, 0))
        if heard == self._heard:
            return
        self._heard = heard
        for rank in range(self._place.world_size):
            if rank not in self._here and connection.has(keys.of_rank(keys.HERE, rank)):
                self._here.add(rank)
            if rank in self._here or not known.check([keys.of_rank(keys.CALL, rank)]):
                continue
            for nonce, *wanted in json.loads(known.get(keys.of_rank(keys.CALL, rank))):
                if self._admits(Wanted(*wanted)):
                    known.compare_set(keys.answer(nonce), "", self.name)
                    self.written.add(f"{self._prefix}/{keys.answer(nonce)}")
                else:
                    self._heard = None

    def _admits(self, other: Wanted) -> bool:
        """Whether a caller is meant to come here; one that wants another epoch is, if that can only be a mistake."""
        if other.label == self._wanted.label:
            return True
        with self._use.lock:
            if any(another._wanted.label == other.label for another in self._use.invitations):
                return False
        return (other.in_main and self._wanted.in_main) or clock.monotonic() - self._since > _GRACE_SECONDS


def prefix_of(peers: str) -> str:
    """Of the keys that ranks know beforehand: another one each time that an agent starts them.

    Several agents do not count their restarts alike.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if os.environ.get("GROUP_WORLD_SIZE") == "1" else "0"
    return f"stream_dataloader/{peers}/{attempt}"


def counted_name(store: Store, peers: str) -> str:
    """Names the next loader of ranks that are several processes each. Each process counts, as none speaks for all."""
    use, prefix = use_of(store), prefix_of(peers)
    if peers not in use.starts:
        use.starts[peers] = store.add(f"{prefix}/{keys.of_rank(keys.STARTS, dist.get_rank())}", 1)
    use.numbers[peers] = use.numbers.get(peers, 0) + 1
    return f"{prefix}/{use.starts[peers]}/{use.numbers[peers]}"
