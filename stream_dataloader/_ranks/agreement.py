"""Where the epoch ends, on every rank at the same step.

::

    step         0 1 2 3 4 5 6 7
    rank 0       # # # # # . .       has data (#) for 5 steps and ends first. It says so, and pads (.) as long as
    rank 1       # # # # # # .       another rank says that it has data. From then on, ranks that have data say so in
    rank 2       # # # # # # #       the background. The last rank to end says where that was.

With lengths the end is known beforehand, and ranks exchange nothing. Without lengths they exchange nothing as long as
all have data. With `padding_mode="drop"` the epoch ends where the first rank ends. The others must know that before
they go on, so ranks ask each other at each step.

Guarantee: a step is delivered on every rank or on none, unless a rank leaves before the end.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import cloudpickle

from stream_dataloader._ranks.rendezvous import FAREWELL_SECONDS, Session
from stream_dataloader._ranks.store import Line
from stream_dataloader.errors import RankError

_FOREVER_SECONDS = 86400.0
_KEPT_STEPS = 64  # a process that is the same rank as another may lag behind


class Steps(Protocol):
    """Decides which steps belong to the epoch."""

    def delivers(self, step: int, has_data: bool) -> bool:
        """Whether a step is delivered, asked for step after step; `has_data`: this rank alone would."""

    def layout(self) -> Any:
        """The layout of other ranks' items.

        Raises:
            RankError: There is no knowing.
        """

    def tell_layout(self, layout: Any) -> None:
        """Let other ranks know the layout of items."""

    def close(self) -> None:
        """The iteration is over, or was left."""


class OwnSteps:
    """One rank alone decides for itself."""

    def delivers(self, step: int, has_data: bool) -> bool:  # noqa: ARG002
        """See `Steps`."""
        return has_data

    def layout(self) -> Any:
        """See `Steps`."""
        raise RankError(
            "this rank has no item to read, from here on, so it cannot know what to pad; use fewer ranks or groups, or "
            "start torch.distributed, so that another rank can tell it"
        )

    def tell_layout(self, layout: Any) -> None:
        """See `Steps`."""

    def close(self) -> None:
        """See `Steps`."""


class CountedSteps(OwnSteps):
    """The number of steps is known."""

    def __init__(self, count: int) -> None:
        self._count = count

    def delivers(self, step: int, has_data: bool) -> bool:  # noqa: ARG002
        """See `Steps`."""
        return step < self._count


class AgreedSteps:
    """Ranks tell each other how far they got.

    Args:
        session: The epoch's, begun.
        every: A step is delivered if every rank has data for it, not if any has.
        step: The first step.
    """

    def __init__(self, session: Session, *, every: bool, step: int) -> None:
        self._session, self._every = session, every
        self._known = step  # steps that this rank has, of which others may hear
        self._tail: int | None = None  # where the first rank ended
        self._last: int | None = None  # where the last one did
        self._over = False
        self._layout: str | None = None
        self._news = threading.Condition()
        self._closed = False
        self._asked, self._waiting = "", False  # the key that was waited for last, and whether it still is
        self._reason: tuple[str, Sequence[int]] | None = None
        self._owner = os.getpid()
        self._listener: threading.Thread | None = None
        if not every:
            listen = partial(self._listen, session.connect)
            self._listener = threading.Thread(target=listen, name="rank-listener", daemon=True)
            self._listener.start()

    def delivers(self, step: int, has_data: bool) -> bool:
        """See `Steps`.

        Raises:
            RankError: A rank that has to be asked did not answer.
        """
        if has_data:
            with self._news:
                self._known = step + 1
                self._news.notify()
            if not self._every:
                return True
        decide = partial(self._everybody_has, step, has_data) if self._every else partial(self._somebody_has, step)

        def ask(line: Line) -> bool:
            delivered = decide(line)
            if not delivered:
                self._session.part(line, "over")
            return delivered

        try:
            delivered = bool(self._session.ask(ask))
        except RankError as error:
            self._reason = (str(error), error.ranks)  # for ranks that wait for this one
            raise
        self._over = not delivered
        return delivered

    def tell_layout(self, layout: Any) -> None:
        """See `Steps`."""
        if self._layout is None and layout is not None:
            with self._news:
                self._layout = cloudpickle.dumps(layout).hex()
                self._news.notify()

    def layout(self) -> Any:
        """See `Steps`."""

        def ask(line: Line) -> str:
            return line.wait("layout", lambda: self._session.lacking(line, "end"), "tell what its items are like")

        return cloudpickle.loads(bytes.fromhex(self._session.ask(ask)))

    def _listen(self, connect: Callable[[], Line]) -> None:
        """Wait for the first rank to end, and from there on say which steps this one has."""
        session, told_layout = self._session, False
        try:
            line = connect()
            while not line.wait_long("tail", _FOREVER_SECONDS):
                if self._closed:
                    return
            told = int(line.text("tail"))
            while True:
                with self._news:
                    while self._known <= told and not self._closed and told_layout == (self._layout is not None):
                        self._news.wait()
                    known, closed = self._known, self._closed
                if self._layout is not None and not told_layout:
                    told_layout = True
                    session.put(line, "layout", self._layout)
                for step in range(told, known):
                    session.put(line, f"has/{step}", "yes")
                session.put(line, f"at/{session.place.rank}", str(known))
                told = max(told, known)
                if closed:
                    line.hang_up()
                    return
        except RuntimeError:  # the store is gone: whoever asks is told so
            return

    def _somebody_has(self, step: int, line: Line) -> bool:
        session, rank, world_size = self._session, self._session.place.rank, self._session.place.world_size
        if self._tail is None:
            self._tail = int(line.keys.compare_set("tail", "", str(step)))
            session.written.add("tail")
            session.put(line, f"ended/{rank}", str(step))
            if session.count(line, f"end/{rank}", "end") == world_size:
                last = max(int(line.text(f"ended/{other}")) for other in range(world_size))
                session.put(line, "last", str(last))
                session.put(line, f"has/{last}", "no")
        if step < self._tail:
            return True
        if self._last is None and line.has("last"):  # all have ended: there is nothing to ask any more
            self._last = int(line.text("last"))
        if self._last is not None:
            return step < self._last
        return self._wait(line, f"has/{step}", "end") == "yes"

    def _everybody_has(self, step: int, has_data: bool, line: Line) -> bool:
        session, rank = self._session, self._session.place.rank
        if not has_data:
            session.put(line, f"has/{step}", "no")
            return False
        if session.count(line, f"have{step}/{rank}", f"have{step}") == session.place.world_size:
            session.put(line, f"has/{step}", "yes")
        old = step - _KEPT_STEPS
        for key in {f"has/{old}", f"have{old}", f"have{old}/{rank}"} & session.written:
            line.keys.delete_key(key)
            session.written.remove(key)
        return self._wait(line, f"has/{step}", f"have{step}") == "yes"

    def _wait(self, line: Line, key: str, counted: str) -> str:
        step = key.partition("/")[2]
        self._asked, self._waiting = key, True
        try:
            told = line.wait(key, lambda: self._session.lacking(line, counted), f"say if it has data for step {step}")
        finally:
            self._waiting = False
        if told.startswith("["):
            raise RankError(*json.loads(told))
        return told

    def close(self) -> None:
        """See `Steps`."""
        if self._closed or self._owner != os.getpid():
            return
        with self._news:
            self._closed = True
            self._news.notify()
        threads = [thread for thread in (self._session.caller.thread, self._listener) if thread is not None]
        store_is_gone = self._reason is not None and not self._reason[1]
        collected = threading.current_thread() in threads  # as garbage, which any thread may find
        if not self._over and not store_is_gone and not collected:
            self._session.say_last(self._leave, busy=self._waiting)
        self._session.close()
        if not store_is_gone and not collected:
            for thread in threads:
                thread.join(FAREWELL_SECONDS)

    def _leave(self, line: Line) -> None:
        """Let nobody wait for this rank, nor this rank's own threads for others."""
        rank, step = self._session.place.rank, self._known
        why = f"rank {rank} left the epoch at step {step}, before its end; see its log, and leave on all ranks at once"
        told = json.dumps(self._reason or (why, [rank]))
        self._session.put(line, f"left/{rank}", told)
        line.keys.compare_set("tail", "", str(step))
        self._session.written.add("tail")
        for key in {self._asked or f"has/{step}", f"has/{step}"}:  # what others wait for now, or next
            line.keys.compare_set(key, "", told)
            self._session.written.add(key)
        self._session.see_off(line, "here", "left", "over")
