"""An epoch that several ranks begin together, once they know that they are about to read the same.

Guarantee: on all ranks the epoch begins, or an error says which rank differs and in what, or which one did not come.
"""

from __future__ import annotations

import contextlib
import json
import time as clock
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from stream_dataloader._ranks.meeting import Hall, Wish
from stream_dataloader._ranks.place import Place
from stream_dataloader._ranks.store import Caller, Line, use_of
from stream_dataloader.errors import RankError, shorten

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

#: Seconds to tell other ranks that this one leaves.
FAREWELL_SECONDS = 2.0
_LOOK_SECONDS = 0.005
_KEPT_SESSIONS = 2  # a process that is the same rank as another may lag behind


class Session:
    """An epoch that the ranks begin together.

    Args:
        place: This rank's.
        store: Through which ranks speak.
        name: The prefix of all keys, alike on all ranks; None: rank 0 chooses one.
        patience: Seconds to wait for another rank.

    Attributes:
        written: Keys that this rank has set.
    """

    def __init__(self, place: Place, store: Store, name: str | None, patience: float) -> None:
        self.place, self.patience = place, patience
        self._store: Store | None = store
        self._name, self._hall = name or "", None if name else Hall(store, place)
        self._keeps_store = dist.get_rank() == 0
        self.written: set[str] = set()
        self._answers: set[str] = set()
        self.caller = Caller(self.connect)

    @property
    def connect(self) -> Callable[[], Line]:
        """Opens a line of this session's; also when that is over, for what is still to be said."""
        return partial(Line, self._open_store, self._name, self.patience, self.place.world_size)

    def ask(self, task: Callable[[Line], Any]) -> Any:
        """Have a task done on the main thread's line; see `Caller.call`."""
        return self.caller.call(task, self.patience)

    def put(self, line: Line, key: str, value: str) -> None:
        """Set a key."""
        line.keys.set(key, value)
        self.written.add(key)

    def count(self, line: Line, key: str, count: str) -> int:
        """See `Line.first`."""
        self.written |= {key, count}
        return line.first(key, count)

    def begin(self, told: Mapping[str, Any]) -> None:
        """Wait for all ranks, and check that they are about to read the same.

        Raises:
            RankError: They are not, or one did not come; names it.
        """
        try:
            self.ask(partial(self._meet, told, Wish(told)))
        except BaseException as error:
            self._give_up(error)
            raise
        past = use_of(self._open_store).past.setdefault(self.place.peers, deque())
        while len(past) > _KEPT_SESSIONS:
            self.caller.post(partial(Line.delete, keys=past.popleft()))

    @property
    def _open_store(self) -> Store:
        assert self._store is not None
        return self._store

    def _meet(self, told: Mapping[str, Any], wish: Wish, line: Line) -> None:
        """Find where the other ranks are, and begin there."""
        if self._hall is None:
            self._begin(told, line)
        elif self.place.rank:
            self._name = self._hall.call(line, wish)
            line.move(self._name)
            self._begin(told, line)
        else:
            door = self._hall.open(wish)
            self._name, self._answers = door.name, door.written
            line.move(self._name)
            try:
                self._begin(told, line, door.answer)
            finally:
                door.close()

    def _begin(self, told: Mapping[str, Any], line: Line, meanwhile: Callable[[Line], object] | None = None) -> None:
        rank, world_size, mine = self.place.rank, self.place.world_size, json.dumps(told)
        self.written |= {"told/0", "differs", "ready"}
        if rank == 0:
            first = json.loads(line.keys.compare_set("told/0", "", mine))
        else:
            first = json.loads(line.wait("told/0", lambda: [0], "begin the epoch"))
        complaint = _complaint(rank, json.loads(mine), first)
        arrived = self.count(line, f"here/{rank}", "here")
        if not arrived and not told["deterministic"]:
            complaint = complaint or (
                f"two processes are rank {rank}, and would not read the same with deterministic=False; leave it at True"
            )
        if complaint:
            line.keys.compare_set("differs", "", json.dumps([complaint, [rank]]))
        if arrived == world_size:
            line.keys.compare_set("ready", "", line.text("differs") if line.has("differs") else "[]")
        ready = json.loads(line.wait("ready", lambda: self.lacking(line, "here"), "begin the epoch", meanwhile))
        self.part(line, "begun", stays=not ready)
        if ready or complaint:
            raise RankError(*(ready or (complaint, [rank])))

    def part(self, line: Line, what: str, *, stays: bool = True) -> None:
        """Say that this rank has read what it needs; the process that keeps the store stays until all have.

        Else the store would end with it, before others that are slow have read the end of their epoch.
        """
        if self.count(line, f"{what}/{self.place.rank}", what) == self.place.world_size:
            self.put(line, f"all/{what}", "")
        elif self._keeps_store and stays:
            with contextlib.suppress(RankError):  # one that died or is stuck has no need of it
                line.wait(f"all/{what}", lambda: self.lacking(line, what), "end")

    def see_off(self, line: Line, came: str, *parted: str) -> None:
        """Where an epoch ends before its time, let others read why, for a moment."""
        deadline = clock.monotonic() + FAREWELL_SECONDS / 2
        others = {rank for rank in range(self.place.world_size) if rank != self.place.rank and self._keeps_store}
        while others and clock.monotonic() < deadline:
            rank = min(others)
            if not line.has(f"{came}/{rank}") or any(line.has(f"{what}/{rank}") for what in parted):
                others.remove(rank)
            else:
                clock.sleep(_LOOK_SECONDS)

    def _give_up(self, error: BaseException) -> None:
        """Let those that wait, and those that come later, know that the epoch does not begin."""
        rank = self.place.rank
        why: tuple[str, Sequence[int]] = (f"rank {rank} left before the epoch began; see its log", [rank])
        if isinstance(error, RankError):
            if not error.ranks:  # the store is out of reach
                return
            why = (str(error), error.ranks)
        if not self._name:  # nobody is met yet
            return

        def tell(line: Line) -> None:
            self.put(line, f"left/{rank}", json.dumps(why))
            line.keys.compare_set("ready", "", json.dumps(why))
            self.see_off(line, "here", "begun", "left")

        self.say_last(tell, busy=not isinstance(error, RankError))  # it was interrupted

    def say_last(self, task: Callable[[Line], Any], *, busy: bool) -> None:
        """Have one more task done, if that is soon; on another line if the main thread's is busy."""
        farewell = Caller(self.connect) if busy else self.caller
        with contextlib.suppress(RankError):
            farewell.call(task, FAREWELL_SECONDS, 0)
        farewell.close()

    def lacking(self, line: Line, what: str) -> list[int]:
        """The ranks that have not counted themselves in something."""
        return [rank for rank in range(self.place.world_size) if not line.has(f"{what}/{rank}")]

    def close(self) -> None:
        """Nothing more is to be said."""
        self.caller.close()
        if self._store is not None:
            use_of(self._store).past.setdefault(self.place.peers, deque()).append(
                {f"{self._name}/{key}" for key in self.written} | self._answers
            )
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
