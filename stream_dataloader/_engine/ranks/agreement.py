"""Agreement of ranks on the epoch's end, at the same step on every rank.

::

    step         0 1 2 3 4 5 6 7
    rank 0       # # # # # . .       has data (#) for 5 steps and ends first. It says so, and pads (.) as long as
    rank 1       # # # # # # .       another rank says that it has data. From then on, ranks that have data say so in
    rank 2       # # # # # # #       the background. The last rank to end announces its last step.

With lengths, ranks exchange nothing. Without, they exchange nothing while all have data, except with `"drop"`, where
they do at each step.

Guarantee: a step is delivered on every rank or on none, unless a rank leaves before the end.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from stream_dataloader._engine.items.plain import layout_from_plain, layout_to_plain
from stream_dataloader._engine.ranks import keys
from stream_dataloader._engine.ranks.rendezvous import Rendezvous
from stream_dataloader._engine.ranks.store import StoreConnection
from stream_dataloader._engine.ranks.store_thread import SHUTDOWN_SECONDS, start_store_thread
from stream_dataloader.errors import RankError, StateError

_FOREVER_SECONDS = 86400.0
_KEPT_STEPS = 64  # several processes may be the same rank, and one of them may lag behind


class Steps:
    """Decision which steps belong to the epoch, made without asking other ranks."""

    def __init__(self, count: int | None = None) -> None:
        self._count = count

    def delivers(self, step: int, has_data: bool) -> bool:
        """Return whether a step is delivered; called for each step in turn; `has_data`: this rank has data for it."""
        return has_data if self._count is None else step < self._count

    def layout(self) -> Any:
        """Return the layout of other ranks' items; raise a RankError if no other rank can be asked."""
        what = "this rank has no items left, so it does not know the shape to pad with"
        raise RankError(f"{what}; use fewer ranks or virtual ranks, or start torch.distributed, so that ranks can ask")

    def note_layout(self, layout: Any) -> None:
        """Tell other ranks the layout of items."""

    def close(self) -> None:
        """End the agreement: the iteration is over, or was left."""


class AgreedSteps(Steps):
    """Decision on which all ranks agree; with `every`, each rank must have data for a step."""

    def __init__(self, rendezvous: Rendezvous, *, every: bool, step: int) -> None:
        super().__init__()
        self._rendezvous = rendezvous
        self._every = every
        self._known = step  # steps for which this rank has data, as told to other ranks
        self._tail: int | None = None  # the step where the first rank ended
        self._last: int | None = None  # the step where the last rank ended
        self._over = False
        self._layout: str | None = None
        self._news = threading.Condition()
        self._closed = False
        self._asked: int | None = None  # the step that other ranks were asked about last
        self._waiting = False  # whether the answer is still missing
        self._error: RankError | None = None  # the error with which this rank left
        self._owner = os.getpid()
        self._listener: threading.Thread | None = None
        if not every:
            self._listener = start_store_thread(partial(self._listen, rendezvous.connect), "rank-listener")

    def delivers(self, step: int, has_data: bool) -> bool:
        if has_data:
            with self._news:
                self._known = step + 1
                self._news.notify()
            if not self._every:
                return True
        decide = partial(self._all_ranks_have, step, has_data) if self._every else partial(self._any_rank_has, step)

        def ask(connection: StoreConnection) -> bool:
            delivered = decide(connection)
            if not delivered:
                self._rendezvous.part(connection, keys.OVER)
            return delivered

        try:
            delivered = bool(self._rendezvous.ask(ask))
        except RankError as error:
            self._error = RankError(str(error), error.ranks)  # a copy for other ranks, without the traceback's frames
            raise
        self._over = not delivered
        return delivered

    def note_layout(self, layout: Any) -> None:
        if self._layout is None and layout is not None:
            with self._news:
                self._layout = _layout_to_text(layout, self._rendezvous.own.rank)
                self._news.notify()

    def layout(self) -> Any:
        def ask(connection: StoreConnection) -> str:
            return connection.wait(keys.LAYOUT, "tell the layout of its items", keys.END)

        return _layout_from_text(self._rendezvous.ask(ask))

    def _listen(self, connect: Callable[[], StoreConnection]) -> None:
        """Wait until the first rank ends; from then on tell the steps for which this rank has data.

        A rank that is behind the first rank's end tells how far it is, too: others wait for it as long as it reads.
        """
        layout_is_put, told = False, -1
        try:
            connection = connect()
            while not connection.wait_long(keys.TAIL, _FOREVER_SECONDS):
                if self._closed:
                    return
            put_until = int(connection.text(keys.TAIL))
            while True:
                with self._news:
                    while self._known == told and not self._closed and layout_is_put == (self._layout is not None):
                        self._news.wait()
                    known, closed = self._known, self._closed
                if self._layout is not None and not layout_is_put:
                    layout_is_put = True
                    connection.put(keys.LAYOUT, self._layout)
                for step in range(put_until, known):
                    connection.put(keys.has(step), keys.YES)
                connection.put(keys.of_rank(keys.AT, self._rendezvous.own.rank), str(known))
                put_until, told = max(put_until, known), known
                if closed:
                    connection.give_back()
                    return
        except RuntimeError:  # the store is gone; the next call of the main thread raises the error
            return

    def _any_rank_has(self, step: int, connection: StoreConnection) -> bool:
        own = self._rendezvous.own
        if self._tail is None:
            self._tail = int(connection.put_first(keys.TAIL, str(step)))
            connection.put(keys.of_rank(keys.ENDED, own.rank), str(step))
            if connection.count(keys.END) == own.world_size:
                ends = [connection.text(keys.of_rank(keys.ENDED, rank)) for rank in range(own.world_size)]
                last = max(map(int, ends))
                connection.put(keys.LAST, str(last))
                connection.put(keys.has(last), keys.NO)
        if step < self._tail:
            return True
        if self._last is None and connection.has(keys.LAST):  # all ranks have ended, so the answer is known
            self._last = int(connection.text(keys.LAST))
        if self._last is not None:
            return step < self._last
        return self._wait(connection, step, keys.END)

    def _all_ranks_have(self, step: int, has_data: bool, connection: StoreConnection) -> bool:
        own = self._rendezvous.own
        if not has_data:
            connection.put(keys.has(step), keys.NO)
            return False
        if connection.count(keys.have(step)) == own.world_size:
            connection.put(keys.has(step), keys.YES)
        old = step - _KEPT_STEPS
        connection.forget(keys.has(old), keys.have(old), keys.of_rank(keys.have(old), own.rank))
        return self._wait(connection, step, keys.have(step))

    def _wait(self, connection: StoreConnection, step: int, counted: str) -> bool:
        self._asked = step
        self._waiting = True
        try:
            answer = connection.wait(keys.has(step), f"say if it has data for step {step}", counted)
        finally:
            self._waiting = False
        return keys.checked(answer) == keys.YES

    def close(self) -> None:
        if self._closed or self._owner != os.getpid():
            return
        with self._news:
            self._closed = True
            self._news.notify()
        threads = [thread for thread in (self._rendezvous.store_thread.thread, self._listener) if thread is not None]
        store_is_gone = self._error is not None and not self._error.ranks
        # Garbage collection may run this in one of the threads that are joined below, which would wait for itself.
        collected = threading.current_thread() in threads
        if not self._over and not store_is_gone and not collected:
            self._rendezvous.report_and_close(self._leave, busy=self._waiting)
        self._rendezvous.close()
        if not store_is_gone and not collected:
            for thread in threads:
                thread.join(SHUTDOWN_SECONDS)

    def _leave(self, connection: StoreConnection) -> None:
        """Release all ranks that wait for this one, and this rank's own threads that wait for others."""
        rank, step = self._rendezvous.own.rank, self._known
        why = f"rank {rank} left the epoch at step {step}, before its end; see its log, and leave on all ranks at once"
        error = keys.pack(self._error or RankError(why, [rank]))
        connection.put(keys.of_rank(keys.LEFT, rank), error)
        connection.put_first(keys.TAIL, str(step))
        for waited in {step if self._asked is None else self._asked, step}:  # steps that others ask about now, or next
            connection.put_first(keys.has(waited), error)
        self._rendezvous.wait_until_read(connection, keys.HERE, keys.LEFT, keys.OVER)


def _layout_to_text(layout: Any, rank: int) -> str:
    """Return a layout as a value for other ranks, or an error if they could not read the layout.

    The value is JSON and not a pickle: the store has no password, so anyone who reaches its port can set this value.
    """
    plain = layout_to_plain(layout)
    if plain is None:
        what = "made of a class that no module has by name, or of a dict whose keys are not strings or numbers"
        remedy = "define the class at the top level of a module"
        text = f"rank {rank} reads items {what}, so ranks without items do not know the shape to pad with; {remedy}"
        return keys.pack(RankError(text, [rank]))
    return json.dumps(plain)


def _layout_from_text(text: str) -> Any:
    """Read the layout of another rank."""
    try:
        return layout_from_plain(json.loads(keys.checked(text)))
    except (StateError, ValueError, RecursionError) as error:
        raise RankError(f"this rank has no items left, and cannot read the layout to pad with: {error}") from error
