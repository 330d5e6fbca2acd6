"""An epoch that several ranks begin together, once they know that they are about to read the same.

Guarantee: on all ranks the epoch begins, or an error says which rank differs and in what, or which one did not come.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from stream_dataloader.distributed import Caller, Line, Place
from stream_dataloader.errors import RankError, shorten


class Session:
    """An epoch that the ranks begin together.

    Args:
        place: This rank's.
        name: Names it, alike on all ranks.
        patience: Seconds to wait for another rank.

    Attributes:
        written: Keys that this rank has set.
    """

    def __init__(self, place: Place, name: str, patience: float) -> None:
        self.place, self.patience = place, patience
        self._prefix = f"stream_dataloader/{name}"
        self.written: set[str] = set()
        self.caller = Caller(self.connect)

    def connect(self) -> Line:
        """A line of this session's."""
        assert self.place.store is not None
        return Line(self.place.store, self._prefix, self.patience)

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
        self.ask(partial(self._begin, told))

    def _begin(self, told: Mapping[str, Any], line: Line) -> None:
        rank, world_size = self.place.rank, self.place.world_size
        if rank == 0:
            self.put(line, "told/0", json.dumps(told))
        first = json.loads(line.wait("told/0", lambda: [0], "begin the epoch"))
        mine = json.loads(json.dumps(told))
        differ = [name for name in mine if mine[name] != first.get(name)]
        complaint = ""
        if differ:
            name = differ[0]
            complaint = (
                f"rank {rank} has {name} {shorten(mine[name], 80)}, and rank 0 {shorten(first.get(name), 80)}; build "
                "dataset and loader alike on all ranks"
            )
            line.keys.compare_set("differs", "", complaint)
        self.written.add("differs")
        if self.count(line, f"here/{rank}", "here") == world_size:
            self.put(line, "ready", line.text("differs") if line.has("differs") else "")
        ready = line.wait("ready", lambda: self.lacking(line, "here"), "begin the epoch")
        if ready or complaint:
            raise RankError(ready or complaint, [rank] if complaint else [])

    def lacking(self, line: Line, what: str) -> list[int]:
        """The ranks that have not counted themselves in something."""
        return [rank for rank in range(self.place.world_size) if not line.has(f"{what}/{rank}")]

    def sweep(self, old: Session) -> None:
        """Delete the keys of a session that is long over."""
        self.ask(lambda line: line.delete(old._prefix, old.written))

    def close(self) -> None:
        """Nothing more is to be said."""
        self.caller.close()
