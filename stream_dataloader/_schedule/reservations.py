"""The tickets that a lane holds ahead of need: the one rule by which a lane takes its next source.

::

    lookahead = 2       held            the lane takes
    it starts           -               reserves a b c, takes a
    next                b c             reserves d,     takes b
    d is refused        c (d)           reserves e,     takes c        refused: no source, for good
    next                (d) (e)         takes d, which was refused: from now on it takes each source when it needs it

Workers, the main process that follows them, and the count of an epoch's steps all use this rule. They only differ in
what a ticket is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from stream_dataloader._schedule.rules import NONE

Ticket = TypeVar("Ticket")


class Reservations(Generic[Ticket]):
    """One lane's tickets ahead.

    Args:
        lookahead: How many a lane holds.
        held: The tickets that it holds, none at the epoch's beginning. None: it takes no more tickets ahead.
    """

    def __init__(self, lookahead: int, held: Iterable[Ticket] | None = ()) -> None:
        self._lookahead = lookahead
        self._held: deque[Ticket] | None = None if held is None or not lookahead else deque(held)

    @property
    def held(self) -> tuple[Ticket, ...] | None:
        """The tickets it holds, in order; None: it takes none ahead any more."""
        return None if self._held is None else tuple(self._held)

    def next(self, reserve: Callable[[], Ticket]) -> Ticket | None:
        """The ticket whose turn it is; None if the lane takes none ahead any more.

        Args:
            reserve: Takes out one more ticket ahead; called once, and when the lane starts `lookahead` times more.
        """
        held = self._held
        if held is None:
            return None
        if held:
            held.append(reserve())
        else:
            held.extend([reserve() for _ in range(self._lookahead + 1)])
        return held.popleft()

    def end(self) -> tuple[Ticket, ...]:
        """Take none ahead any more, as the last was refused; returns those still held, which are refused too."""
        held, self._held = self.held or (), None
        return held


def next_grant(reservations: Reservations[int], draw: Callable[[bool], int]) -> int:
    """The grant that a lane takes next, where a ticket is decided as soon as it is taken out; `NONE` if it gets none.

    Args:
        reservations: The lane's tickets ahead, each of them its grant.
        draw: Takes out a ticket, ahead or now, and returns its grant.
    """
    grant = reservations.next(lambda: draw(True))
    if grant is not None and grant != NONE:
        return grant
    reservations.end()
    return draw(False)
