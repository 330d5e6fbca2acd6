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
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from stream_dataloader._ranks import keys
from stream_dataloader._ranks.place import RankPlace
from stream_dataloader._ranks.store import StoreConnection, StoreUse, use_of
from stream_dataloader.errors import RankError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_GRACE_SECONDS = 5.0  # for the same epoch to begin in another thread, before ranks that differ meet


class Wish:
    """What an epoch is that a rank is about to begin.

    Args:
        terms: What must be alike on all ranks.
    """

    def __init__(self, terms: Mapping[str, Any]) -> None:
        whole = json.dumps(terms, sort_keys=True).encode()
        self.label = hashlib.blake2b(whole, digest_size=8).hexdigest()
        self.in_main = threading.current_thread() is threading.main_thread()


class Hall:
    """The keys that all ranks know beforehand, by which they find each other.

    Args:
        store: Through which ranks speak.
        place: This rank's.
    """

    def __init__(self, store: Store, place: RankPlace) -> None:
        self._prefix = prefix_of(place.peers)
        self._use = use_of(store)
        self._place = place

    def call(self, connection: StoreConnection, wish: Wish) -> str:
        """The name under which rank 0 begins an epoch, to which this rank comes.

        Raises:
            RankError: Rank 0 begins none.
        """
        nonce = uuid.uuid4().hex
        connection.move(self._prefix)
        self._say(connection, lambda: self._calls.update({nonce: (wish.label, wish.in_main)}))
        try:
            name = connection.wait(keys.answer(nonce), lambda: [0], "begin the epoch")
        except RankError:
            self._say(connection, lambda: self._calls.pop(nonce))
            raise
        self._say(connection, lambda: self._calls.pop(nonce))
        connection.store.delete_key(keys.answer(nonce))
        return name

    @property
    def _calls(self) -> dict[str, tuple[str, bool]]:
        return self._use.calls.setdefault(self._place.peers, {})

    def _say(self, connection: StoreConnection, change: Callable[[], object]) -> None:
        """Change this rank's open calls, of all threads, and let rank 0 see them."""
        with self._use.lock:
            change()
            calls = json.dumps([(nonce, *wish) for nonce, wish in self._calls.items()])
            connection.store.set(keys.of_rank(keys.CALL, self._place.rank), calls)
        connection.store.add(keys.CALLS, 1)

    def open(self, wish: Wish) -> Door:
        """Begin an epoch, as rank 0."""
        return Door(self._prefix, self._use, self._place, wish)


class Door:
    """Rank 0's side: tells those that call where they are awaited, until it is closed.

    Attributes:
        name: Under which the epoch begins.
        written: The keys of answers, which nobody may have read.
    """

    def __init__(self, prefix: str, use: StoreUse, place: RankPlace, wish: Wish) -> None:
        self.name = f"{prefix}/{uuid.uuid4().hex}"
        self._prefix = prefix
        self._use = use
        self._place = place
        self._wish = wish
        self.written: set[str] = set()
        self._heard: int | None = None  # how often calls had changed when they were looked at; None: look again
        self._here: set[int] = {place.rank}
        self._since = clock.monotonic()
        with use.lock:
            use.doors.append(self)

    def answer(self, connection: StoreConnection) -> None:
        """Answer new calls; a rank that waits does this between two looks at the store."""
        hall = connection.under(self._prefix)
        heard = int(hall.add(keys.CALLS, 0))
        if heard == self._heard:
            return
        self._heard = heard
        for rank in range(self._place.world_size):
            if rank not in self._here and connection.has(keys.of_rank(keys.HERE, rank)):
                self._here.add(rank)
            if rank in self._here or not hall.check([keys.of_rank(keys.CALL, rank)]):
                continue
            for nonce, label, in_main in json.loads(hall.get(keys.of_rank(keys.CALL, rank))):
                if self._admits(label, in_main=in_main):
                    hall.compare_set(keys.answer(nonce), "", self.name)
                    self.written.add(f"{self._prefix}/{keys.answer(nonce)}")
                else:
                    self._heard = None

    def _admits(self, label: str, *, in_main: bool) -> bool:
        """Whether a caller is meant to come here; one that wants another epoch is, if that can only be a mistake."""
        if label == self._wish.label:
            return True
        with self._use.lock:
            if any(door is not self and door._wish.label == label for door in self._use.doors):
                return False
        return (in_main and self._wish.in_main) or clock.monotonic() - self._since > _GRACE_SECONDS

    def close(self) -> None:
        """Answer no more."""
        with self._use.lock:
            self._use.doors.remove(self)


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
